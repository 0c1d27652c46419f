//! `aeonctl methodology`: the folder of methodologies that stations load with their bases.

use std::path::PathBuf;

use aeon_proto::methodology::{KRule, MethodologySpec};
use aeon_station::basis::methodologies::{Methodologies, Methodology, add, read_spec};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::{Context, usage};

/// What to do with a folder of methodologies.
#[derive(Debug, Subcommand)]
pub(crate) enum MethodologyCommand {
    /// Check a spec and put it into a folder
    Add {
        /// Folder of methodologies, made if it does not exist
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Spec to add, a JSON file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Name in the folder, such as qwen-0.5b/k8 [default: the spec's model / the file's name]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// List the methodologies of a folder with their ids
    List {
        /// Folder of methodologies
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Show what methodologies say
    Show {
        /// Folder of methodologies
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Name or id (0x…) of the one to show; all if left out
        #[arg(value_name = "NAME")]
        name: Option<String>,
    },
}

impl MethodologyCommand {
    pub(crate) fn run(self, context: &Context) -> anyhow::Result<()> {
        match self {
            Self::Add { folder, file, name } => {
                let spec = read_spec(&file)?;
                let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
                let name = name.unwrap_or_else(|| format!("{}/{stem}", spec.model()));
                let path = add(&folder, &name, &spec)?;
                match context.json {
                    true => println!("{}", describe(&Methodology { name, path, spec })),
                    false => println!("{:#010x}  {name}  {}", spec.id(), path.display()),
                }
            }
            Self::List { folder } => {
                let all = Methodologies::load(&folder)?;
                if context.json {
                    println!("{}", Value::Array(all.iter().map(describe).collect()));
                    return Ok(());
                }
                let mut all: Vec<_> = all.iter().collect();
                all.sort_by(|a, b| a.name.cmp(&b.name));
                let width = all.iter().map(|methodology| methodology.name.len()).max().unwrap_or(0).max(4);
                println!("{:<10}  {:<width$}  {:>5}  {:>5}  rule", "id", "name", "width", "k");
                for methodology in all {
                    let spec = &methodology.spec;
                    let k = spec.k_rule().k(spec.hidden_dim()).map_or_else(|_| "-".to_owned(), |k| k.to_string());
                    let (name, rule) = (&methodology.name, rule(spec.k_rule()));
                    println!("{:#010x}  {name:<width$}  {:>5}  {k:>5}  {rule}", spec.id(), spec.hidden_dim());
                }
            }
            Self::Show { folder, name } => {
                let all = Methodologies::load(&folder)?;
                let is_named = |methodology: &&Methodology| {
                    name.as_ref().is_none_or(|name| {
                        methodology.name == *name || format!("{:#010x}", methodology.spec.id()) == name.to_lowercase()
                    })
                };
                let found: Vec<_> = all.iter().filter(is_named).collect();
                if let (Some(name), true) = (&name, found.is_empty()) {
                    return Err(usage(format!("{}: no methodology has the name or id {name}", folder.display())));
                }
                if context.json {
                    println!("{}", Value::Array(found.into_iter().map(describe).collect()));
                    return Ok(());
                }
                for methodology in found {
                    let value: Value = serde_json::from_str(methodology.spec.canonical())?;
                    println!("{:#010x}  {}  {}", methodology.spec.id(), methodology.name, methodology.path.display());
                    println!("{value:#}");
                }
            }
        }
        Ok(())
    }
}

/// A rule for `k` in words.
pub(crate) fn rule(rule: KRule) -> String {
    match rule {
        KRule::PerThousand { per_thousand, floor } => format!("{per_thousand} per thousand, at least {floor}"),
        KRule::Fixed(k) => format!("always {k}"),
        KRule::Coverage { per_thousand } => format!("as few as cover {per_thousand} per thousand of the variance"),
        KRule::Unknown => "unknown to this version".to_owned(),
    }
}

/// A rule for `k` as a spec writes it.
pub(crate) fn rule_json(rule: KRule, spec: Option<&MethodologySpec>) -> Value {
    match rule {
        KRule::PerThousand { per_thousand, floor } => json!({ "per_thousand": per_thousand, "floor": floor }),
        KRule::Fixed(k) => json!({ "fixed": k }),
        KRule::Coverage { per_thousand } => json!({ "coverage_per_thousand": per_thousand }),
        KRule::Unknown => spec
            .and_then(|spec| serde_json::from_str::<Value>(spec.canonical()).ok())
            .map_or(Value::Null, |mut spec| spec["k_rule"].take()),
    }
}

fn describe(methodology: &Methodology) -> Value {
    let spec = &methodology.spec;
    json!({
        "id": format!("{:#010x}", spec.id()),
        "name": methodology.name,
        "path": methodology.path.display().to_string(),
        "k": spec.k_rule().k(spec.hidden_dim()).ok(),
        "spec": serde_json::from_str::<Value>(spec.canonical()).unwrap_or_default(),
    })
}

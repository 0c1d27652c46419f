//! `aeonctl generate`: text out of a mesh, as it comes.

use std::{
    io::{IsTerminal, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aeon_proto::qres::Format;
use aeon_station::{
    basis::BasisFile,
    client::{
        Pipeline, StationAddress, Wire,
        generate::{GenerateOptions, resume},
        pipeline::{PcarWire, QuantisedWire},
        sampler::Sampling,
    },
    demo,
    model::LayerRange,
    text::{chat::Message, tokenizer::Tokenizer},
};
use anyhow::Context as _;
use clap::Args;

use crate::{Context, auto::Auto, report, unfinished::Unfinished, usage, verdict};

/// The values of `--wire`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WireForm {
    Exact,
    Pcar,
    Quantised(Format),
    Auto,
}

impl WireForm {
    const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Pcar => "pcar",
            Self::Quantised(format) => format.name(),
            Self::Auto => "auto",
        }
    }
}

impl std::str::FromStr for WireForm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "exact" => Ok(Self::Exact),
            "pcar" => Ok(Self::Pcar),
            "auto" => Ok(Self::Auto),
            _ => Format::from_name(name).map(Self::Quantised).ok_or_else(|| {
                let kinds = Format::ALL.map(Format::name).join(", ");
                format!("{name:?} is none of exact, auto, pcar, {kinds}")
            }),
        }
    }
}

/// Options of `aeonctl generate`.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Text to go on from; - or nothing reads standard input
    #[arg(value_name = "PROMPT")]
    prompt: Option<String>,
    /// tokenizer.json, model directory or GGUF file with the model's vocabulary (not needed for the demo model)
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// 0 takes the most likely token each time; higher is bolder
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the most likely tokens that make up this share of the probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Candidates to draw from at most
    #[arg(long, value_name = "K", default_value_t = 64)]
    top_k: u32,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Form of residuals between stations: exact is raw f32. All others change the text: f16 and i8 rarely, q8 to q3 (8 to
    /// 3 bits a coordinate) the more the fewer bits, less where both stations of a hop have a basis with the mean; pcar
    /// sends PCA components where both stations have the same basis, and ruins most texts; auto takes for each hop the smallest
    /// body that keeps the whole mesh within --budget, and says which and why
    #[arg(long, value_name = "exact|auto|f16|i8|q8|q7|q6|q5|q4|q3|pcar", default_value = "exact")]
    wire: WireForm,
    /// Components at most, with --wire pcar [default: as many as the basis has]
    #[arg(long, value_name = "K", requires = "wire")]
    k: Option<u32>,
    /// With --wire pcar or q3 to q8, use only this basis; this client then also compresses for stations behind one that
    /// has no basis
    #[arg(long, value_name = "FILE.pcab")]
    basis: Option<PathBuf>,
    /// With --wire auto, what all hops together may cost in perplexity, in per cent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    budget: f64,
    /// With --wire auto, judge by this evaluation of the same cuts, what aeonctl --json evaluate printed, and not by text
    /// that the mesh writes first
    #[arg(long, value_name = "FILE.json")]
    evaluation: Option<PathBuf>,
    /// With --wire pcar, use bases that failed their own evaluation all the same
    #[arg(long)]
    force: bool,
    /// Skip the prefill if all stations remember the prompt; let them remember it otherwise
    #[arg(long)]
    replay: bool,
    /// Put the prompt into the model's chat template
    #[arg(long)]
    chat: bool,
    /// Station that takes the place of one with the same layers if that fails; may be given several times. The text goes
    /// on with the same tokens
    #[arg(long = "standby", value_name = "S")]
    standbys: Vec<StationAddress>,
    /// Ask a station that owes an answer whether it is alive after so long without a sign of it; one that is not is named
    /// (or replaced) before twice this time has passed
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    health_interval: f64,
    /// Go on with a text that was cut short by a station that failed, from the file that was named then; the file is
    /// removed when the text is finished
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "chat", "replay"]
    )]
    resume: Option<PathBuf>,
}

impl Generate {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        if !(0.0..=100.0).contains(&self.temperature) {
            return Err(usage(format!("--temperature {} is not between 0 and 100", self.temperature)));
        }
        if !(0.0..=1.0).contains(&self.top_p) {
            return Err(usage(format!("--top-p {} is not between 0 and 1", self.top_p)));
        }
        if !(0.0..=1000.0).contains(&self.budget) {
            return Err(usage(format!("--budget {} is not between 0 and 1000", self.budget)));
        }
        if !(0.05..=3600.0).contains(&self.health_interval) {
            return Err(usage(format!("--health-interval {} is not between 0.05 and 3600", self.health_interval)));
        }
        let stations = context.stations()?;
        let prompt = if self.resume.is_some() { String::new() } else { self.read_prompt()? };
        let mut client = context.options.clone();
        client.health_interval = Some(Duration::from_secs_f64(self.health_interval));
        let (mut pipeline, missing) = Pipeline::connect_with_standbys(stations, &self.standbys, &client).await?;
        for (standby, error) in missing {
            tracing::warn!("standby {standby} is not there now; it is asked again when it is needed: {error}");
        }
        if self.k.is_some() && self.wire != WireForm::Pcar {
            return Err(usage("--k is the number of PCA components; it goes with --wire pcar only"));
        }
        if self.wire != WireForm::Exact {
            let local = self.basis.as_deref().map(BasisFile::open).transpose()?.map(Arc::new);
            if self.wire == WireForm::Pcar {
                verdict::check(&pipeline, local.as_deref(), self.force)?;
            }
            let basis_fp = local.as_ref().map(|basis| basis.basis_fp());
            pipeline.set_wire(match self.wire {
                WireForm::Exact => Wire::Exact,
                WireForm::Pcar => Wire::Pcar(PcarWire { basis_fp, k: self.k, local }),
                WireForm::Quantised(format) => Wire::Quantised(QuantisedWire { format, basis_fp, local }),
                WireForm::Auto => {
                    let auto = Auto { evaluation: self.evaluation.as_deref(), budget: self.budget, local };
                    let (wire, chosen) = auto.wire(&pipeline, context).await?;
                    eprint!("{chosen}");
                    wire
                }
            });
        }
        if self.replay {
            pipeline.use_replay();
        }
        let tokenizer = tokenizer_for(self.tokenizer.as_deref(), &pipeline)?;
        let mut unfinished = match &self.resume {
            Some(path) => Unfinished::read(path, &pipeline, &self.wire_text())?,
            None => {
                let ids = self.encode(&tokenizer, &prompt, &pipeline)?;
                let options = GenerateOptions {
                    max_tokens: self.max_tokens,
                    sampling: Sampling { temperature: self.temperature, top_p: self.top_p, seed: self.seed },
                    top_k: self.top_k,
                    stop: tokenizer.eos().to_vec(),
                };
                Unfinished::new(&pipeline, ids, &options, self.wire_text())
            }
        };
        let (prompt, before, options) = (unfinished.prompt.clone(), unfinished.tokens.clone(), unfinished.options());
        let mut decoder = tokenizer.decoder_after(&prompt);
        // What was shown already is not shown again.
        let mut text: String = before.iter().map(|token| decoder.push(*token)).collect();
        let show = |piece: &str| {
            if !context.json {
                let mut out = std::io::stdout();
                // A reader that went away (head, less) ends the run below.
                return out.write_all(piece.as_bytes()).and_then(|()| out.flush()).is_ok();
            }
            true
        };
        let generated = {
            let on_token = |token| {
                unfinished.tokens.push(token);
                let piece = decoder.push(token);
                text.push_str(&piece);
                show(&piece)
            };
            let generating = resume(&mut pipeline, &prompt, &before, &options, on_token);
            tokio::select! {
                generated = generating => Some(generated),
                _ = tokio::signal::ctrl_c() => None,
            }
        };
        let Some(generated) = generated else {
            // Dropping the request has told the stations to stop; the message must leave before the process does.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            let _ = pipeline.reset().await;
            if !context.json {
                println!();
            }
            anyhow::bail!("interrupted after {} characters; the stations were told to stop", text.chars().count());
        };
        let generated = match generated {
            Ok(generated) => generated,
            Err(error) => {
                if !context.json && !text.is_empty() {
                    println!();
                }
                let path = unfinished.write(self.resume.as_deref())?;
                let count = unfinished.tokens.len();
                eprintln!("cut short after {count} tokens; when the station is back, go on with:");
                eprintln!("  {}", self.how_to_resume(stations, &path));
                return Err(error.into());
            }
        };
        let rest = decoder.finish();
        text.push_str(&rest);
        show(&rest);
        let hops = report::hops(&pipeline);
        if context.json {
            let mut value = report::json(&generated, prompt.len(), &hops, &text);
            value["tokens"] = unfinished.tokens.into();
            value["failovers"] = report::failovers_json(pipeline.failovers());
            println!("{value}");
        } else {
            println!();
            eprint!("\n{}", report::text(&generated, prompt.len(), &hops));
            eprint!("{}", report::failovers_text(pipeline.failovers()));
        }
        if let Some(path) = &self.resume {
            // It is of no more use; that it cannot be removed is no failure of the text.
            let _ = std::fs::remove_file(path);
        }
        // A capture that is under way ends first: it takes what the session holds.
        pipeline.captured().await;
        // The memory on the stations is given back; that it cannot be is no failure of the text.
        let _ = pipeline.reset().await;
        Ok(())
    }

    fn read_prompt(&self) -> anyhow::Result<String> {
        if let Some(text) = self.prompt.as_deref().filter(|text| *text != "-") {
            return Ok(text.to_owned());
        }
        if std::io::stdin().is_terminal() {
            eprintln!("reading the prompt from standard input; end it with Ctrl-D");
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("reading the prompt from standard input")?;
        Ok(text)
    }

    /// The form of residuals as options of the command line, as far as it changes the tokens.
    fn wire_text(&self) -> String {
        match (self.wire, self.k) {
            (WireForm::Pcar, Some(k)) => format!("pcar --k {k}"),
            (WireForm::Auto, _) => {
                let evaluation = self.evaluation.as_ref().map(|path| format!(" --evaluation {}", path.display()));
                format!("auto --budget {}{}", self.budget, evaluation.unwrap_or_default())
            }
            (form, _) => form.name().to_owned(),
        }
    }

    /// The command line that goes on with a text.
    fn how_to_resume(&self, stations: &[StationAddress], path: &Path) -> String {
        let mut line = "aeonctl".to_owned();
        for station in stations {
            line += &format!(" --station {station}");
        }
        line += " generate";
        for standby in &self.standbys {
            line += &format!(" --standby {standby}");
        }
        if let Some(tokenizer) = &self.tokenizer {
            line += &format!(" --tokenizer {}", tokenizer.display());
        }
        if self.wire != WireForm::Exact {
            line += &format!(" --wire {}", self.wire_text());
        }
        if let Some(basis) = &self.basis {
            line += &format!(" --basis {}", basis.display());
        }
        if self.force {
            line += " --force";
        }
        line + &format!(" --resume {}", path.display())
    }

    fn encode(&self, tokenizer: &Tokenizer, prompt: &str, pipeline: &Pipeline) -> anyhow::Result<Vec<u32>> {
        let mut ids = if self.chat {
            let template = tokenizer
                .chat_template()
                .ok_or_else(|| usage("this model's files have no chat template; leave --chat out"))?;
            tokenizer.encode(&template.render(&[Message::new("user", prompt)], true)?, false)?
        } else {
            tokenizer.encode(prompt, true)?
        };
        if ids.is_empty() {
            ids.extend(pipeline.model().bos);
        }
        if ids.is_empty() {
            return Err(usage("the prompt is empty and the model has no token that begins a text; give a prompt"));
        }
        let context_len = pipeline.model().max_position;
        if ids.len() > context_len {
            return Err(usage(format!(
                "the prompt has {} tokens, the context of {} is {context_len}; shorten it",
                ids.len(),
                pipeline.model().name
            )));
        }
        Ok(ids)
    }
}

/// The vocabulary at `path`, or the demo model's for the demo model.
pub(crate) fn tokenizer_for(path: Option<&Path>, pipeline: &Pipeline) -> anyhow::Result<Tokenizer> {
    let model = pipeline.model();
    let tokenizer = match path {
        Some(path) => Tokenizer::from_path(path)?,
        None if model.config_fp == demo::load(None)?.info().config_fp => demo::tokenizer()?,
        None => {
            return Err(usage(format!(
                "the stations serve {}, whose vocabulary is needed here: add --tokenizer with its tokenizer.json, \
                 model directory or GGUF file",
                model.name
            )));
        }
    };
    if tokenizer.vocab() > model.vocab {
        return Err(usage(format!(
            "the tokenizer has {} tokens, the model {} only {}; they do not belong together",
            tokenizer.vocab(),
            model.name,
            model.vocab
        )));
    }
    Ok(tokenizer)
}

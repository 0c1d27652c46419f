//! Commands that ask stations one thing: hello, health, forward.

use std::{io::Read, path::PathBuf};

use aeon_proto::{payload::MetaWriter, residual, route::Route};
use aeon_station::client::{Client, Reply};
use anyhow::Context as _;
use clap::Args;
use serde_json::Value;

use crate::{Context, usage};

pub(crate) async fn hello(context: &Context) -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for address in context.stations()? {
        let client = Client::connect(address, context.options.clone()).await?;
        let mut answer: Value = serde_json::from_str(&client.hello_reply().await?.meta)?;
        if context.json {
            answer["address"] = address.to_string().into();
            answers.push(answer);
            continue;
        }
        let (station, model) = (&answer["station"], &answer["model"]);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        println!("{address}");
        println!(
            "  station     {} (version {}), up {} ms",
            text(&station["name"]),
            text(&station["version"]),
            station["uptime_ms"]
        );
        println!("  model       {}, {} wide, {} token ids", text(&model["name"]), model["hidden_dim"], model["vocab"]);
        println!("  layers      {}..{} of {}", answer["layers"][0], answer["layers"][1], model["n_layers"]);
        println!("  context     {} positions", model["max_position"]);
        println!("  config      {}", text(&model["config_fp"]));
        println!("  weights     {}", text(&model["layers_fp"]));
        println!("  accepts     {}", answer["accepts"]);
        let limits = &answer["limits"];
        println!(
            "  limits      frame {} bytes, datagram {} bytes, {} positions a request",
            limits["max_frame"], limits["max_datagram"], limits["max_seq"]
        );
    }
    if context.json {
        println!("{}", Value::Array(answers));
    }
    Ok(())
}

pub(crate) async fn health(context: &Context) -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for address in context.stations()? {
        let client = Client::connect(address, context.options.clone()).await?;
        // Over UDP the answer must be within three times the request's size unless the address is proven.
        let padding = if client.is_udp() { "0".repeat(400) } else { String::new() };
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            if !padding.is_empty() {
                meta.string("pad", &padding);
            }
        };
        let mut answer: Value = serde_json::from_str(&client.request(Route::HEALTH, meta, &[]).await?.meta)?;
        if context.json {
            answer["address"] = address.to_string().into();
            answers.push(answer);
            continue;
        }
        println!("{address}");
        if let Value::Object(members) = &answer {
            for (key, value) in members.iter().filter(|(key, _)| *key != "status") {
                match value {
                    Value::Object(parts) => {
                        let parts: Vec<_> = parts.iter().map(|(name, count)| format!("{name} {count}")).collect();
                        println!("  {key:<20} {}", parts.join(", "));
                    }
                    value => println!("  {key:<20} {value}"),
                }
            }
        }
    }
    if context.json {
        println!("{}", Value::Array(answers));
    }
    Ok(())
}

/// Options of `aeonctl forward`.
#[derive(Debug, Args)]
pub(crate) struct Forward {
    /// Token ids to send, comma-separated (needs layer 0)
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "input")]
    ids: Vec<u32>,
    /// File of packed little-endian f32 residuals to send; - for standard input
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Session to go on with
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// Position of the first token in the session
    #[arg(long, value_name = "N")]
    pos: Option<u64>,
    /// Ask for the token after the last position (needs the last layer)
    #[arg(long)]
    token: bool,
    /// File for the residuals that come back, packed little-endian f32
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Forward {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        let mut body = Vec::new();
        match &self.input {
            None if self.ids.is_empty() => return Err(usage("nothing to send; give --ids 1,2,3 or --input FILE")),
            None => residual::encode_u32s(&self.ids, &mut body),
            Some(path) if path.as_os_str() == "-" => {
                std::io::stdin().read_to_end(&mut body).context("reading standard input")?;
            }
            Some(path) => body = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?,
        }
        let client = Client::connect(context.station()?, context.options.clone()).await?;
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            if let Some(session) = &self.session {
                meta.string("session", session);
            }
            if let Some(pos) = self.pos {
                meta.unsigned("pos", pos);
            }
            if self.input.is_none() {
                meta.string("in", "ids");
            }
            if self.token {
                meta.string("out", "token");
            }
            meta.boolean("timing", true);
        };
        let reply = client.request(Route::FORWARD, meta, &body).await?;
        if let Some(path) = &self.output {
            std::fs::write(path, &reply.body).with_context(|| format!("writing {}", path.display()))?;
        }
        self.print(context, &reply)
    }

    fn print(&self, context: &Context, reply: &Reply) -> anyhow::Result<()> {
        let mut answer: Value = serde_json::from_str(&reply.meta)?;
        if self.token {
            let token = residual::decode_u32s(&reply.body)?.first().copied();
            answer["token"] = token.into();
            match context.json {
                true => println!("{answer}"),
                false => println!("token {}", answer["token"]),
            }
            return Ok(());
        }
        let values = residual::decode_f32s(&reply.body)?;
        let width = reply.number("dim").and_then(|dim| usize::try_from(dim).ok()).unwrap_or(1).max(1);
        let norms: Vec<f32> = values.chunks(width).map(|row| row.iter().map(|x| x * x).sum::<f32>().sqrt()).collect();
        if context.json {
            answer["norms"] = norms.into();
            println!("{answer}");
            return Ok(());
        }
        println!("{}", reply.meta);
        for (row, norm) in values.chunks(width).zip(norms) {
            let first: Vec<_> = row.iter().take(4).map(|value| format!("{value:.4}")).collect();
            println!("  norm {norm:.4}  [{}, …]", first.join(", "));
        }
        Ok(())
    }
}

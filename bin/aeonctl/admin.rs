//! Commands that change a running node: reload, drain.

use aeon_station::{
    causes::with_causes,
    client::admin::{AdminAddress, AdminAnswer, DEFAULT_ADMIN},
};
use serde_json::{Value, json};

use crate::Context;

/// A node that answered no.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// The nodes named, or the one of this machine.
pub(crate) fn addresses(context: &Context) -> anyhow::Result<Vec<AdminAddress>> {
    match context.admins.is_empty() {
        true => Ok(vec![DEFAULT_ADMIN.parse()?]),
        false => Ok(context.admins.clone()),
    }
}

/// `aeonctl reload`.
pub(crate) async fn reload(context: &Context) -> anyhow::Result<()> {
    for_each(context, "/reload", |answer| answer["text"].as_str().unwrap_or("done").to_owned()).await
}

/// `aeonctl drain`.
pub(crate) async fn drain(context: &Context) -> anyhow::Result<()> {
    let text =
        |answer: &Value| format!("draining, {} requests in flight; it stops when they have ended", answer["in_flight"]);
    for_each(context, "/drain", text).await
}

/// Asks every node, whatever the others answer; ends with the first thing that went wrong.
async fn for_each(context: &Context, route: &str, text: impl Fn(&Value) -> String) -> anyhow::Result<()> {
    let mut first_error: Option<anyhow::Error> = None;
    let mut answers = Vec::new();
    for address in addresses(context)? {
        let answer = address.post(route, context.options.request_timeout).await;
        let mut shown = json!({ "address": address.to_string() });
        let error: Option<anyhow::Error> = match answer {
            Ok(AdminAnswer { status, text: body }) => {
                let value: Value = serde_json::from_str(&body).unwrap_or(Value::Null);
                let is_done = (200..300).contains(&status) && value.is_object();
                if is_done && !context.json {
                    println!("{address}  {}", text(&value));
                }
                let problem = value["error"].as_str().map_or_else(|| format!("HTTP status {status}"), str::to_owned);
                shown["answer"] = value;
                (!is_done).then(|| Refused(format!("{address} refused {route}: {problem}")).into())
            }
            Err(error) => {
                shown["error"] = with_causes(&error).into();
                Some(error.into())
            }
        };
        answers.push(shown);
        if let Some(error) = error {
            // All but the first are told here; the first one ends the program and is told by it.
            if first_error.is_some() {
                crate::common::report(error.as_ref());
            }
            first_error.get_or_insert(error);
        }
    }
    if context.json {
        println!("{}", Value::Array(answers));
    }
    first_error.map_or(Ok(()), Err)
}

//! What all binaries share: reading arguments, reporting errors, exit codes.

use clap::{CommandFactory, FromArgMatches};

/// The command line or the configuration is wrong.
pub(crate) const USAGE: u8 = 64;
/// A station cannot be reached.
pub(crate) const UNAVAILABLE: u8 = 69;

/// Reads the command line; help and version end the process with 0, a mistake with 64.
pub(crate) fn parse<C: CommandFactory + FromArgMatches>() -> C {
    let parsed = C::command().try_get_matches().and_then(|matches| C::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        let code = if error.use_stderr() { i32::from(USAGE) } else { 0 };
        // A closed pipe is no reason to fail.
        let _ = error.print();
        std::process::exit(code)
    })
}

/// Writes an error with all its causes to stderr.
pub(crate) fn report(error: &dyn std::error::Error) {
    eprintln!("error: {}", aeon_station::causes::with_causes(error));
}

/// Prints the completions of a program.
pub(crate) fn print_completions<C: CommandFactory>(shell: clap_complete::Shell) {
    let mut command = C::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut std::io::stdout());
}

//! The program `verbring`: measures one-sided communication on this machine, serves files from memory and pulls them,
//! and says what of the machine helps or hurts.

mod doctor;
mod files;
mod perf;
mod pull;
mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use verbring_cli::sim;

/// One-sided communication through rings: measure it, use it, and look at the machine it runs on.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure puts, gets, atomics and signals between two processes of this machine.
    Perf(perf::Args),
    /// Offer files from memory to `pull`.
    Serve(serve::Args),
    /// Fetch a file that `serve` offers.
    Pull(pull::Args),
    /// Say what of this machine helps or hurts, each with the remedy.
    Doctor(doctor::Args),
    /// Run random operations over a simulated network that fails, and check every promise.
    Sim(sim::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Perf(args) => perf::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Sim(args) => sim::run(&args),
    }
}

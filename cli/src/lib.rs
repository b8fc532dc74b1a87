//! The part of the program `verbring` that tests use too: the simulation.

pub mod sim;

//! Any control packets against the control channel.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| verbring_sim_fuzz::channel::run(data));

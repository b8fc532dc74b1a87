//! A hostile peer against a whole device.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| verbring_sim_fuzz::rc::run(data));

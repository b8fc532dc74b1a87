//! Any bytes as a RoCEv2 packet.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| verbring_sim_fuzz::packet::run(data));

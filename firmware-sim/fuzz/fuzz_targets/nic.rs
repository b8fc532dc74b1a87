//! A hostile peer against a NIC.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| verbring_sim_fuzz::nic::run(data, None));

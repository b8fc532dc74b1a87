//! Link arguments of each program. They stand here and not in a `.cargo/config.toml`, because `RUSTFLAGS` of the
//! environment would replace those.

fn main() {
    let directory = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let script = format!("-T{directory}/bare.ld");

    // No start files, no libraries; no-pie because nobody would apply the relocations.
    for program in ["host", "bare", "hotloop"] {
        for argument in ["-nostartfiles", "-nodefaultlibs", "-static", "-no-pie"] {
            println!("cargo:rustc-link-arg-bin={program}={argument}");
        }
    }
    println!("cargo:rustc-link-arg-bin=bare={script}");
    println!("cargo:rustc-link-arg-bin=bare=-Wl,-z,norelro,--build-id=none");
    // Nobody calls the exported functions, and all of them are to be linked.
    println!("cargo:rustc-link-arg-bin=hotloop=-Wl,--no-gc-sections");

    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=bare.ld");
}

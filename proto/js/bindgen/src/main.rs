//! `aeon-proto-bindgen MODULE.wasm OUT_DIR`: writes the module and the JavaScript and TypeScript that go with it.

use anyhow::Context as _;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(module), Some(out), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: aeon-proto-bindgen MODULE.wasm OUT_DIR");
    };
    wasm_bindgen_cli_support::Bindgen::new()
        .input_path(&module)
        .web(true)?
        .typescript(true)
        .remove_name_section(true)
        .remove_producers_section(true)
        .generate(&out)
        .with_context(|| format!("{}: the module must be built with the wasm-bindgen of this tool", module.display()))
}

//! The files in `bases/`: a change of them is a change of what stations agree on, so their fingerprints stand here.

use std::path::PathBuf;

use aeon_station::{
    basis::{Registry, registry::Source},
    demo,
    model::LayerRange,
};

#[test]
fn the_demo_basis_and_the_methodologies_are_as_their_readme_says() {
    let bases = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("bases");
    let source = Source { methodologies: Some(bases.join("methodologies")), ..Source::new(bases.join("demo")) };
    let set = Registry::open(source).unwrap().current();
    let file = set.find(0x0721_7390, 0x7426_6d19).unwrap();
    let readme = std::fs::read_to_string(bases.join("README.md")).unwrap();
    assert!(readme.contains(file.blake3().to_hex().as_str()));
    let model = demo::load(None).unwrap();
    assert_eq!(file.hidden_dim() as usize, model.info().hidden_dim);
    let boundaries: Vec<_> = file.boundaries().map(|part| (part.boundary, part.k)).collect();
    assert_eq!(boundaries, (0..=model.info().n_layers).map(|boundary| (boundary, 64)).collect::<Vec<_>>());
    assert!(file.boundaries().all(|part| part.explained(64) > 0.87 && file.median_norm(part.boundary).is_some()));
    let expected = [
        (0x7426_6d19, "demo/k64", 128, 64),
        (0xe18a_c075, "qwen-0.5b/k8", 896, 8),
        (0xb1bb_4252, "qwen-coder-7b/derive_policy_3584", 3584, 29),
    ];
    assert_eq!(set.methodologies().iter().len(), expected.len());
    for (id, name, width, k) in expected {
        let methodology = set.methodologies().get(id).unwrap();
        assert_eq!((&*methodology.name, methodology.spec.hidden_dim()), (name, width));
        assert_eq!(methodology.spec.k_rule().k(width), Ok(k));
        assert!(readme.contains(&format!("`{name}` | `{id:#010x}` | {width} | {k} |")));
    }
}

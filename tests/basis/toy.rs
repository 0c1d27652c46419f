//! Small valid basis files and their methodology.

use std::{fs, path::Path};

use aeon_proto::{methodology::MethodologySpec, pcab::PcabWriter};

pub(crate) const DIM: usize = 8;

/// The methodology of all toy bases.
pub(crate) fn spec() -> MethodologySpec {
    MethodologySpec::parse(r#"{"model":"toy","hidden_dim":8,"k_rule":{"fixed":2},"boundaries":[0,1,2]}"#).unwrap()
}

/// A basis of three boundaries: the first and second share two components, the third has a mean only. `variant` only
/// changes the metadata, so that the numbers are the same and the fingerprint is not.
pub(crate) fn basis(variant: &str) -> Vec<u8> {
    let means: Vec<[f32; DIM]> = (0..3).map(|boundary| [boundary as f32 + 0.5; DIM]).collect();
    let mut rows = [0.0; 2 * DIM];
    (rows[1], rows[2]) = (0.6, 0.8);
    rows[DIM + 5] = -1.0;
    let mut writer = PcabWriter::new(DIM as u32, spec().id());
    writer.entry(0, &means[0], &rows, &[4.0, 2.0, 8.0]).unwrap();
    writer.shared_entry(1, &means[1], 0, &[1.0, 2.0, 4.0]).unwrap();
    writer.entry(2, &means[2], &[], &[5.0]).unwrap();
    writer
        .finish(&format!(r#"{{"model":"toy","variant":"{variant}","boundaries":{{"1":{{"median_norm":3.5}}}}}}"#))
        .unwrap()
}

/// A folder with the methodology and one basis file for each name, whose variant is the name.
pub(crate) fn folder(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("methodologies")).unwrap();
    fs::write(folder.path().join("methodologies/toy.json"), spec().canonical()).unwrap();
    for name in names {
        write(folder.path(), name, &basis(name));
    }
    folder
}

pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(format!("{name}.pcab")), bytes).unwrap();
}

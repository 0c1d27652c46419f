//! A basis in use while its file is destroyed in every way: results stay the same, and nothing ends the process.

use std::{
    fs,
    io::{Seek, Write},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use aeon_proto::{kernel, pcab::PcabWriter};
use aeon_station::basis::{BasisFile, Registry, registry::Source};

use crate::toy;

const DIM: usize = 1024;
const K: usize = 256;

/// A megabyte of basis, so that pages of it are not touched yet when the file is destroyed.
fn basis() -> Vec<u8> {
    let mean: Vec<f32> = (0..DIM).map(|j| j as f32 / 7.0).collect();
    let mut rows = vec![0.0; K * DIM];
    for (row, values) in rows.chunks_exact_mut(DIM).enumerate() {
        values[row * 4] = 1.0;
    }
    let mut variance = vec![1.0; K];
    variance.push(K as f32);
    let mut writer = PcabWriter::new(DIM as u32, 7);
    writer.entry(0, &mean, &rows, &variance).unwrap();
    writer.finish("{}").unwrap()
}

fn lift(file: &BasisFile) -> Vec<f32> {
    let part = file.boundary(0).unwrap();
    let components: Vec<f32> = (0..K).map(|i| i as f32 * 0.25 - 3.0).collect();
    let mut out = vec![0.0; DIM];
    kernel::lift(part.mean, part.basis, &components, &mut out).unwrap();
    out
}

/// Lifts without pause while `destroy` does its work, and some hundred times after it.
fn lifts_on(destroy: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pcab");
    fs::write(&path, basis()).unwrap();
    let file = BasisFile::open(&path).unwrap();
    let expected = lift(&BasisFile::from_bytes(&path, &basis()).unwrap());
    let (done, count) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let lifting = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert_eq!(lift(&file), expected);
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let wait_for = |more: u64| {
            let target = count.load(Ordering::Relaxed) + more;
            while count.load(Ordering::Relaxed) < target && !lifting.is_finished() {
                thread::yield_now();
            }
        };
        wait_for(1);
        destroy(&path);
        wait_for(200);
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(file.bytes(), basis());
}

#[test]
fn truncated() {
    lifts_on(|path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap());
}

#[test]
fn overwritten_in_place() {
    lifts_on(|path| {
        let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
        for _ in 0..3 {
            file.rewind().unwrap();
            file.write_all(&vec![0xff; basis().len()]).unwrap();
            file.sync_all().unwrap();
        }
    });
}

#[test]
fn replaced_by_rename() {
    lifts_on(|path| {
        let other = path.with_extension("new");
        fs::write(&other, b"something else").unwrap();
        fs::rename(other, path).unwrap();
    });
}

#[test]
fn deleted() {
    lifts_on(|path| fs::remove_file(path).unwrap());
}

#[test]
fn withdrawn_while_a_request_holds_it() {
    let folder = toy::folder(&["a"]);
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    let request = registry.current();
    let file = Arc::clone(request.bases().next().unwrap());
    let watch = Arc::downgrade(&file);
    drop(request);
    fs::remove_file(folder.path().join("a.pcab")).unwrap();
    let reload = registry.reload().unwrap();
    assert_eq!((reload.withdrawn, reload.kept), (vec![file.basis_fp()], 0));
    assert!(registry.current().is_empty());
    assert_eq!(file.bytes(), toy::basis("a"));
    drop(file);
    assert!(watch.upgrade().is_none(), "the memory is given back with the last request");
}

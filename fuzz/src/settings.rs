//! Configuration files.

use crate::{
    config::settings::Settings,
    model::spec::{LayerSpec, ModelSpec},
};

/// A file is refused with a reason, or holds settings that write to a file which holds the same; values are judged without
/// a panic, and what they are read to is what they say.
pub(crate) fn file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let settings = match Settings::parse(text) {
        Ok(settings) => settings,
        Err(error) => return drop(error.to_string()),
    };
    let written = settings.to_toml().expect("what a file held fits a file");
    assert_eq!(Settings::parse(&written).as_ref(), Ok(&settings), "{written}");
    assert_eq!(settings.clone().or(Settings::default()), settings);
    assert_eq!(Settings::default().or(settings.clone()), settings);
    let _ = format!("{settings:?}");

    if let Err(error) = settings.check_numbers() {
        assert!(!error.to_string().is_empty());
    }
    if let Ok(mode) = settings.listen.mode() {
        let text = settings.listen.uds_mode.as_deref().unwrap_or("660");
        assert!(mode <= 0o777 && format!("{mode:o}").ends_with(text.trim_start_matches('0')), "{text} is not {mode:o}");
    }
    for (networks, texts) in [
        (settings.listen.allowed(), &settings.listen.allow),
        (settings.listen.admin_allowed(), &settings.listen.admin_allow),
    ] {
        let texts = texts.as_deref().unwrap_or_default();
        match networks {
            Ok(networks) => assert_eq!(networks.len(), texts.len()),
            Err(error) => assert!(texts.contains(&error.got), "{error}"),
        }
    }
    match settings.model.model.as_deref().map(ModelSpec::parse) {
        Some(Ok(ModelSpec::Identity { hidden_dim, vocab } | ModelSpec::Upstream { hidden_dim, vocab, .. })) => {
            assert!(hidden_dim > 0 && vocab > 0);
        }
        Some(Ok(ModelSpec::Directory(path) | ModelSpec::Gguf(path))) => {
            assert_eq!(path.to_str(), settings.model.model.as_deref());
        }
        Some(Ok(ModelSpec::Demo)) | None => {}
        Some(Err(error)) => drop(error.to_string()),
    }
    if let Some(Ok(layers)) = settings.model.layers.as_deref().map(LayerSpec::parse) {
        let range = layers.range();
        assert!(range.start < range.end);
        assert_eq!(LayerSpec::parse(&format!("{}..{}", range.start, range.end)), Ok(layers));
    }
}

//! Conversations as the text that a chat model was trained on, by the template that comes with the model.

use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::tokenizer::TextError;

/// Steps that a template may take: several thousand times what the longest known one needs for a long conversation, and
/// over in a second. It stops a template that does not end.
const MAX_STEPS: u64 = 10_000_000;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of a role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A template and the tokens it may name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Takes a template in Jinja and the texts of the tokens that begin and end a text (empty if there are none).
    ///
    /// # Errors
    /// [`TextError::Template`] if it is not well formed.
    pub fn new(source: impl Into<String>, bos: impl Into<String>, eos: impl Into<String>) -> Result<Self, TextError> {
        let template = Self { source: source.into(), bos: bos.into(), eos: eos.into() };
        environment()
            .and_then(|environment| environment.template_from_str(&template.source).map(|_| ()))
            .map_err(|source| TextError::Template { source })?;
        Ok(template)
    }

    /// The text of a conversation; with `add_generation_prompt`, up to where the model's answer begins. It contains the
    /// special tokens: encode it without adding others.
    ///
    /// # Errors
    /// [`TextError::Template`], also if the template refuses the messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TextError> {
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => message.role.as_str(), content => message.content.as_str() })
            .collect();
        let values = context! {
            messages,
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        environment()
            .and_then(|environment| environment.render_str(&self.source, values))
            .map_err(|source| TextError::Template { source })
    }
}

/// The dialect that templates are written for.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation() -> Vec<Message> {
        vec![Message::new("system", "Be brief."), Message::new("user", " Hi ")]
    }

    #[test]
    fn renders_the_usual_constructs() {
        let source = "{{ bos_token }}{% for m in messages %}
            {%- if m['role'] == 'system' and loop.first %}[{{ m.content.strip() }}]
            {%- elif not m.role.startswith('sys') %}
{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:{% endif %}";
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        let text = template.render(&conversation(), true).unwrap();
        assert_eq!(text, "<s>[Be brief.]user: Hi</s>\nassistant:");
        assert_eq!(template.render(&conversation(), false).unwrap(), "<s>[Be brief.]user: Hi</s>\n");
    }

    #[test]
    fn refuses_what_it_must() {
        assert!(matches!(ChatTemplate::new("{% for %}", "", ""), Err(TextError::Template { .. })));
        let strict = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", "", "").unwrap();
        let error = strict.render(&conversation(), true).unwrap_err();
        assert!(format!("{:?}", std::error::Error::source(&error)).contains("roles must alternate"));
    }

    #[test]
    fn a_template_that_does_not_end_is_stopped() {
        let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let endless = ChatTemplate::new(nested, "", "").unwrap();
        assert!(matches!(endless.render(&[], true), Err(TextError::Template { .. })));
    }
}

//! What a chat template does is found by rendering it: whether it works, and whether it takes the
//! arguments of earlier calls as text or as objects.

use serde_json::json;

use crate::conversation::{Arguments, ChatMessage, Conversation, ToolCall};
use crate::render_failure::RenderFailure;

/// Arguments of the call, as Python writes them unless it escapes them. No template has these
/// words.
const ARGUMENTS: &str = r#"{"baton_probe": "probed baton é"}"#;

/// What was found.
#[derive(Debug)]
pub(crate) struct Probed {
    pub(crate) arguments: Arguments,
    /// What fails, and with what conversation.
    pub(crate) warnings: Vec<String>,
}

/// Renders a template for a few conversations. An error: it takes none.
pub(crate) fn probe(
    render: impl Fn(&Conversation, Arguments) -> Result<String, RenderFailure>,
) -> Result<Probed, String> {
    let mut failures = Vec::new();
    let plain = plain_conversations();
    for (about, conversation) in &plain {
        match render(conversation, Arguments::Object) {
            Err(failure) if failure.is_limit() => return Err(failure.problem()),
            Err(failure) if !failure.is_raised() => failures.push((*about, failure)),
            _ => {}
        }
    }
    let takes_none = failures.len() == plain.len() && failures.iter().all(|(_, failure)| failure.is_of_template());
    if let Some((_, first)) = failures.first()
        && takes_none
    {
        return Err(first.problem());
    }
    if let Err(failure) = render(&with_tools(), Arguments::Object)
        && !failure.is_raised()
    {
        failures.push(("with tools", failure));
    }
    let (arguments, failure) = arguments(&render);
    failures.extend(failure.map(|failure| ("with a tool call", failure)));
    let warning = |(about, failure): &(&str, RenderFailure)| format!("{about}: {}", failure.problem());
    Ok(Probed { arguments, warnings: failures.iter().map(warning).collect() })
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into(), ..ChatMessage::default() }
}

fn plain_conversations() -> [(&'static str, Conversation); 3] {
    let user = || message("user", "Hello");
    [
        ("with one message", Conversation::new(vec![user()])),
        ("with three messages", Conversation::new(vec![user(), message("assistant", "Hi"), user()])),
        ("with a system message", Conversation::new(vec![message("system", "Be brief."), user()])),
    ]
}

fn with_tools() -> Conversation {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}},
        "required": ["city"],
    });
    let function = json!({"name": "weather", "description": "The weather", "parameters": parameters});
    let tools = vec![json!({"type": "function", "function": function})];
    Conversation { tools, ..Conversation::new(vec![message("user", "Hello")]) }
}

/// Conversations with a call; some templates refuse one or the other.
fn with_calls() -> [Conversation; 3] {
    // Mistral's take ids of nine letters and digits.
    let call = ToolCall { id: "abcdef123".into(), name: "weather".into(), arguments: ARGUMENTS.into() };
    let called = ChatMessage { tool_calls: vec![call], ..message("assistant", "") };
    let answer = ChatMessage { name: "weather".into(), tool_call_id: "abcdef123".into(), ..message("tool", "rain") };
    let messages = vec![message("user", "Hello"), called, answer];
    let asked = Conversation { messages, ..with_tools() };
    let unanswered =
        Conversation { messages: asked.messages[..2].to_vec(), add_generation_prompt: false, ..asked.clone() };
    let without_tools = Conversation { tools: Vec::new(), ..asked.clone() };
    [asked, unanswered, without_tools]
}

/// How the template takes arguments, and what fails if it takes neither form.
fn arguments(
    render: impl Fn(&Conversation, Arguments) -> Result<String, RenderFailure>,
) -> (Arguments, Option<RenderFailure>) {
    let mut first = None;
    for conversation in &with_calls() {
        let as_text = render(conversation, Arguments::Text);
        let as_object = render(conversation, Arguments::Object);
        match (as_text, as_object) {
            (Ok(text), Ok(object)) if is_shown(&text) || is_shown(&object) => return (better(&text, &object), None),
            (Ok(text), Err(_)) if is_shown(&text) => return (Arguments::Text, None),
            (Err(_), Ok(object)) if is_shown(&object) => return (Arguments::Object, None),
            (Err(_), Err(failure)) if !failure.is_raised() => first = first.or(Some(failure)),
            _ => {}
        }
    }
    // Hugging Face and most servers give objects.
    (Arguments::Object, first)
}

/// Whether a prompt says anything of the arguments.
fn is_shown(prompt: &str) -> bool {
    prompt.contains("baton_probe") || prompt.contains("probed baton")
}

/// Text, if the template writes it as it is, and does not write an object better: as text, a prompt
/// that repeats what the model wrote finds its cached prefix. An object, if the template encodes
/// the text once more, leaves it out, or writes the fields of an object in a form of its own.
fn better(text: &str, object: &str) -> Arguments {
    let is_json = object.contains(ARGUMENTS);
    let is_python = object.contains("{'baton_probe'");
    if text.contains(ARGUMENTS) && (is_json || is_python || !is_shown(object)) {
        return Arguments::Text;
    }
    Arguments::Object
}

//! Chat templates give what Hugging Face's engine gives: `fixtures/generate_templates.py` writes
//! what that is.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_text::{ChatMessage, ChatTemplate, Conversation, Tokenizer, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Constructs that are not equal, after the reason.
#[rustfmt::skip]
const KNOWN_DIFFERENCES: &[(&str, &[&str])] = &[
    (
        "Python refuses these values, and the engine takes them",
        &[
            "{{ 1 in 'abc' }}",
            "{{ none in 'abc' }}",
            "{{ 1 < 'a' }}",
            "{{ none < 1 }}",
            "{{ none|join }}",
            "{{ none|list }}",
            "{{ [1, 'a']|sort }}",
            "{{ [none, 1]|sort }}",
            "{{ none|truncate }}",
            "{{ 'abc'.startswith(['a']) }}",
            "{{ 'a' is odd }}",
            "{{ a < 1 }}",
        ],
    ),
    (
        "a list is not told from an iterator, a tuple or a view of a dictionary",
        &[
            "{{ range(3) is sequence }}",
            "{% macro wrap(t) %}{% endmacro %}{{ wrap.arguments }}",
            "{% for k, v in {'ab': 1} %}{{ k }}{{ v }}{% endfor %}",
            "{{ messages|map(attribute='role') is sequence }}",
            "{{ messages|map(attribute='role')|tojson }}",
            "{{ {'a': 1}.keys() }}",
            "{{ {'a': 1}.values() }}",
            "{{ {'a': 1}.items() }}",
            "{{ range(3) }}",
            "{{ [{'a': 1}, {'a': 2}, {'b': 3}]|groupby('a', default=0)|list }}",
        ],
    ),
    (
        "attributes of Python's objects are not there, only their items and methods",
        &[
            "{{ 'a'.encode is defined }}",
            "{{ {'a': 1}.items is defined }}",
            "{{ self }}",
            "{% for x in [1, 2, 3] %}{{ loop.cycle('a', 'b') }}{{ loop }}{% endfor %}",
            "{% macro f(x) -%}   {{ x }}   {%- endmacro %}[{{ f('a') }}]{{ f('b')|trim }}{{ f is callable }}{{ f.name }}{{ f.catch_varargs }}{{ f.catch_kwargs }}{{ f.caller }}",
            "{{ {'a': 1}|attr('a') }}",
            "{{ 'abc'|attr('upper') is defined }}",
            "{{ messages[0]|attr('role') }}",
            "{{ self is defined }}",
        ],
    ),
    (
        "methods that change bytes, or name characters by number, and that no template has use for",
        &[
            "{{ 'x'.encode() }}",
            "{{ 'abc'.translate({97: 'z'}) }}",
            "{{ 'abc'.maketrans('a', 'b') }}",
            "{{ '{a}'.format_map({'a': 7}) }}",
            "{{ {'a': 1}.fromkeys(['x']) }}",
        ],
    ),
    (
        "`str.format` has neither fields of values nor `!r`",
        &[
            "{{ 'x {a} {b[0]} {c.d!r:>6}'.format(a=1, b=[2], c={'d': 3}) }}",
            "{{ '{!r} {!s}'.format('a', 'a') }} {{ '{:05d} {:+d} {:x} {:#x} {:b} {:e} {:%} {:>+8.2f}'.format(7, 7, 255, 255, 5, 1234.5, 0.25, 3.14159) }} {{ '{{}} {}'.format(1) }} {{ '{:^9}|{:*<5}|{:.2}'.format('mid', 'a', 'xyz') }}",
        ],
    ),
    (
        "numbers have 128 bits",
        &[
            "{{ 10 ** 40 }}",
            "{{ 12345678901234567890 * 98765432109876543210 }}",
        ],
    ),
    (
        "escapes and numbers that are spelled in a rare way",
        &[
            "{{ 'a\\\nb' }}",
            r#"{{ '\N{SNOWMAN}' }}"#,
            r#"{{ '\a'|length }}"#,
            r#"{{ '\U0001F600' }}"#,
            r#"{{ '\ud83d\ude00'|length }}"#,
            "{{ 007 }}",
            "{{ 1__0 }}",
            "{{ 1. }}",
            "{{ 1.e3 }}",
        ],
    ),
    (
        "the engine sets defaults of macros before their parameters",
        &[
            "{% macro a(x, y=x) %}{{ x }}{{ y }}{% endmacro %}{{ a(1) }}",
            "{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }} {{ f(1, c=5) }} {{ f(1, 2, 3) }}",
            "{% macro f(a, b=a ~ '!') %}{{ b }}{% endmacro %}{{ f('x') }}{{ f('x', 'y') }}",
            "{% macro f(a, a) %}{% endmacro %}",
        ],
    ),
    (
        "a prompt that is random, dummy text, or HTML is no prompt",
        &[
            "{{ lipsum(n=0) }}",
            "{{ [1, 2]|random in [1, 2] }}",
            "{{ 'abc'|random in 'abc' }}",
            "{{ 'http://example.com x'|urlize }}",
            "{{ '&lt;a&gt; &eacute;'|striptags }}",
            "{{ ['abs', 'attr', 'batch', 'capitalize', 'center', 'count', 'd', 'default', 'dictsort', 'e', 'escape', 'filesizeformat', 'first', 'float', 'forceescape', 'format', 'groupby', 'indent', 'int', 'items', 'join', 'last', 'length', 'list', 'lower', 'map', 'max', 'min', 'pprint', 'random', 'reject', 'rejectattr', 'replace', 'reverse', 'round', 'safe', 'select', 'selectattr', 'slice', 'sort', 'string', 'striptags', 'sum', 'title', 'trim', 'truncate', 'unique', 'upper', 'urlencode', 'urlize', 'wordcount', 'wordwrap', 'xmlattr', 'tojson']|reject('filter')|list }}",
        ],
    ),
    (
        "the engine's own functions of this name do less, or write it otherwise",
        &[
            "{% set ns = namespace(x=1, y='a') %}{% for i in [1, 2, 3] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('|') %}{% for i in [1, 2] %}{{ j() }}{{ i }}{% endfor %}",
            "{{ {1: 'x', none: 2, true: 3}|tojson }}",
            "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}{% for i in range(2) %}{% set ns.a = ns.a * 10 %}{% endfor %}{{ ns.a }}",
            "{{ messages|pprint }}",
            "{{ {'b': 1, 'a': [2]}|pprint }}",
            "{{ {'a': 1}[:1] }}",
            "{{ [1, 2][1.0] }}",
            "{{ dict([('a', 1)]) }}",
        ],
    ),
    (
        "only `+` knows of safe texts, not the methods and filters",
        &[
            "{{ [1] + ['a'|safe] }}",
            "{{ ('<'|safe)[0] + '>' }}",
            "{{ ('%s'|safe) % '<' }}",
            "{{ ('a'|safe).upper() + '<' }}",
            "{{ ('a'|safe).join(['<', '>']) }}",
            "{{ ('{}'|safe).format('<') }}",
            "{{ (messages[0].content|safe).replace('H', '<') }}",
            r#"{{ ('a\n'|safe|indent) + '<' }}"#,
        ],
    ),
    (
        "tables of Unicode that Rust's library has not",
        &[
            "{{ 'ǆ'.title() }}",
            "{{ '一'.isnumeric() }}",
            "{{ '①'.isdigit() }}",
            "{{ '৪'.isdigit() }}",
        ],
    ),
];

#[derive(Deserialize)]
struct Given {
    name: String,
    messages: Vec<GivenMessage>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default)]
    documents: Vec<Value>,
    #[serde(default)]
    variables: Map<String, Value>,
    add_generation_prompt: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GivenMessage {
    role: String,
    content: String,
    name: String,
    reasoning_content: String,
    tool_calls: Vec<GivenCall>,
    tool_call_id: String,
}

#[derive(Deserialize)]
struct GivenCall {
    id: String,
    function: GivenFunction,
}

#[derive(Deserialize)]
struct GivenFunction {
    name: String,
    arguments: String,
}

/// A template, and for each conversation the texts that are right; none if it must fail.
#[derive(Deserialize)]
struct Rendered {
    name: String,
    source: Option<String>,
    texts: Vec<Vec<String>>,
}

/// A template of one line; no text if it must fail.
#[derive(Deserialize)]
struct Construct {
    source: String,
    text: Option<String>,
}

fn fixture(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn conversations() -> Vec<(String, Conversation)> {
    let given: Vec<Given> = serde_json::from_str(&fixture("conversations.json")).expect("JSON");
    given.into_iter().map(|given| (given.name.clone(), conversation(given))).collect()
}

fn conversation(given: Given) -> Conversation {
    let call = |GivenCall { id, function: GivenFunction { name, arguments } }| ToolCall { id, name, arguments };
    let message = |given: GivenMessage| ChatMessage {
        role: given.role,
        content: given.content,
        name: given.name,
        reasoning: given.reasoning_content,
        tool_calls: given.tool_calls.into_iter().map(call).collect(),
        tool_call_id: given.tool_call_id,
    };
    Conversation {
        messages: given.messages.into_iter().map(message).collect(),
        tools: given.tools,
        documents: given.documents,
        variables: given.variables,
        add_generation_prompt: given.add_generation_prompt.unwrap_or(true),
        continue_final_message: false,
    }
}

/// The time at which the fixtures were made: 2026-02-03 04:05:06.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_770_091_506)
}

fn render(source: &str, conversation: &Conversation) -> Result<String, String> {
    let template = ChatTemplate::from_source(source, &Tokenizer::bytes()).map_err(|error| error.to_string())?;
    let template = template.with_special_tokens("<s>", "</s>");
    template.render(conversation, now()).map(|prompt| prompt.text()).map_err(|error| error.to_string())
}

/// What a template gave for the conversations.
#[derive(Default)]
struct Outcome {
    equal: usize,
    both_fail: usize,
    differences: Vec<String>,
}

fn compare(template: &Rendered, conversations: &[(String, Conversation)]) -> Outcome {
    let Rendered { name, source, texts } = template;
    let source = source.clone().unwrap_or_else(|| fixture(&format!("templates/{name}.jinja")));
    assert_eq!(texts.len(), conversations.len(), "{name}");
    let mut outcome = Outcome::default();
    for ((about, conversation), right) in conversations.iter().zip(texts) {
        match render(&source, conversation) {
            Ok(given) if right.contains(&given) => outcome.equal += 1,
            Err(_) if right.is_empty() => outcome.both_fail += 1,
            given => outcome.differences.push(format!("{name}, {about}:\n  given {given:?}\n  not   {right:?}")),
        }
    }
    outcome
}

fn templates(text: &str) -> Vec<Rendered> {
    serde_json::from_str(text).expect("JSON of generate_templates.py")
}

#[test]
fn chat_templates_render_as_in_jinja2() {
    let conversations = conversations();
    let templates = templates(&fixture("templates.json"));
    assert!(templates.len() >= 16 && conversations.len() >= 12, "{} templates", templates.len());
    let found: Vec<_> = templates.iter().flat_map(|template| compare(template, &conversations).differences).collect();
    assert!(found.is_empty(), "{}:\n{}", found.len(), found.join("\n"));
}

#[test]
fn jinja_constructs_give_what_jinja2_gives() {
    let constructs: Vec<Construct> = serde_json::from_str(&fixture("constructs.json")).expect("JSON");
    let (_, conversation) = &conversations()[0];
    let mut wrong = Vec::new();
    for Construct { source, text } in &constructs {
        let given = render(source, conversation);
        let is_equal = given.as_ref().ok() == text.as_ref();
        let known = KNOWN_DIFFERENCES.iter().find(|(_, sources)| sources.contains(&source.as_str()));
        if is_equal == known.is_some() {
            wrong.push(format!("{source}\n  given {given:?}\n  Jinja2 {text:?}\n  known: {known:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), constructs.len(), wrong.join("\n"));
    let mut known = KNOWN_DIFFERENCES.iter().flat_map(|(_, sources)| *sources);
    let stale = known.find(|known| !constructs.iter().any(|construct| construct.source == **known));
    assert_eq!(stale, None, "is not in constructs.json");
}

#[test]
#[ignore = "needs templates that scripts/compare-templates.sh has rendered: BATON_TEMPLATES"]
fn given_chat_templates_render_as_in_jinja2() {
    let path = std::env::var("BATON_TEMPLATES").expect("BATON_TEMPLATES");
    let templates = templates(&fs::read_to_string(path).expect("a file"));
    let conversations = conversations();
    let mut total = Outcome::default();
    println!("equal  both fail  differ  template");
    for template in &templates {
        let outcome = compare(template, &conversations);
        let differ = outcome.differences.len();
        println!("{:5}  {:9}  {differ:6}  {}", outcome.equal, outcome.both_fail, template.name);
        total.equal += outcome.equal;
        total.both_fail += outcome.both_fail;
        total.differences.extend(outcome.differences);
    }
    let differ = total.differences.len();
    println!("{:5}  {:9}  {differ:6}  {} templates", total.equal, total.both_fail, templates.len());
    assert!(templates.len() >= 29, "{} templates", templates.len());
    assert!(total.differences.is_empty(), "{}", total.differences.join("\n"));
}

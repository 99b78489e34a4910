//! What the library says of a grammar, in words about what the client gave.

/// Longest problem, characters.
const MAX_CHARS: usize = 512;
/// Parts of what the library says, and what that means to a client.
const MEANINGS: [(&str, &str); 12] = [
    ("Unsatisfiable schema", "no value has this form"),
    ("NoExtensionBias", "no text has this form"),
    ("lookarounds not supported", r"\b, and ends of the text in mid-regex, are not supported"),
    ("too big", TOO_COMPLEX),
    ("schema too large", TOO_COMPLEX),
    ("fuel exhausted", TOO_COMPLEX),
    ("precomputation failed", TOO_COMPLEX),
    ("Too many items", TOO_COMPLEX),
    ("Current row has", TOO_COMPLEX),
    ("operation cancelled", TOO_COMPLEX),
    ("lexer error", "no token of a grammar begins or goes on like this"),
    (
        "oneOf constraints are not supported",
        "oneOf is taken if no value can be of two of its schemas; otherwise use anyOf",
    ),
];
pub(crate) const TOO_COMPLEX: &str =
    "it is too complex: shorten it, or make it less ambiguous, for example with required properties";

/// A problem in a line. Places are named in a client's grammar alone: those in one that was
/// composed of other forms say nothing.
pub(crate) fn problem(grammar: &str, error: &str) -> String {
    let mut line = None;
    let mut rest = error;
    // What encloses the place comes before it.
    while let Some((at, after)) = place(rest) {
        line = Some(at);
        rest = after;
    }
    // An excerpt of the grammar comes behind.
    let (first, more) = rest.split_once('\n').unwrap_or((rest, ""));
    let schema = first.strip_prefix("failed to compile JSON schema: ");
    let reason = schema.unwrap_or(first);
    // The expression comes before what is wrong with it, and may be long.
    let in_regex = reason.starts_with("invalid regex ").then(|| reason.rsplit_once(" (in ")).flatten();
    let reason = in_regex.and_then(|(_, place)| place.split_once("): ")).map_or(reason, |(_, reason)| reason);
    let parsed = (reason == "regex parse error:").then(|| more.lines().find_map(|line| line.strip_prefix("error: ")));
    let is_regex = in_regex.is_some() || parsed.is_some();
    let reason = parsed.flatten().or_else(|| reason.split(" (at \"").next()).unwrap_or_default();
    let known = MEANINGS.iter().find(|(part, _)| reason.contains(part));
    let reason = known.map_or(reason, |(_, meaning)| meaning);
    let line = line.filter(|_| grammar.starts_with('{') && schema.is_none());
    let line = line.map_or_else(String::new, |line| format!("line {line}: "));
    let what = if is_regex { "invalid regex: " } else { "" };
    format!("{line}{what}{reason}").chars().take(MAX_CHARS).collect()
}

/// The line that an error begins with, as `at 2(8): ` or `2(8): `, and what comes after it.
fn place(error: &str) -> Option<(usize, &str)> {
    let error = error.strip_prefix("at ").unwrap_or(error);
    let (line, rest) = error.split_once('(')?;
    let (column, rest) = rest.split_once("): ")?;
    column.parse::<usize>().ok()?;
    Some((line.parse().ok()?, rest))
}

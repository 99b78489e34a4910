//! Formats of texts.

/// Formats that the library holds to.
const KNOWN: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Known formats that others mean otherwise: without a zone, with fractions, with other letters.
const VAGUE: [&str; 5] = ["date-time", "time", "duration", "email", "uri"];
/// Formats that no text fails.
const EMPTY: [&str; 7] = ["password", "binary", "byte", "path", "file-path", "directory-path", "string"];
/// A date of RFC 3339.
const DATE: &str =
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d))";
/// A time of RFC 3339.
const TIME: &str = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)";

/// Whether the library holds to a format.
pub(super) fn is_known(name: &str) -> bool {
    KNOWN.contains(&name)
}

/// Whether a format says something of a text here.
pub(super) fn is_named(name: &str) -> bool {
    is_known(name) || pattern(name).is_some()
}

/// Whether a pattern beside a known format says it better.
pub(super) fn is_vague(name: &str) -> bool {
    VAGUE.contains(&name)
}

/// Whether a format is true of every text.
pub(super) fn says_nothing(name: &str) -> bool {
    EMPTY.contains(&name)
}

/// A format as a pattern, if it is one: those of names, and those that the library does not know.
pub(super) fn pattern(name: &str) -> Option<String> {
    Some(match name {
        "date" => format!("^{DATE}$"),
        "time" => format!("^{TIME}$"),
        "date-time" => format!("^{DATE}[tT]{TIME}$"),
        "uuid" | "guid" => uuid("[0-9a-fA-F]"),
        "uuid1" | "uuid3" | "uuid4" | "uuid5" | "uuid6" | "uuid7" | "uuid8" => uuid(&name[4..]),
        "base64" => "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$".to_owned(),
        "base64url" => "^[A-Za-z0-9_-]*={0,2}$".to_owned(),
        "jwt" => r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*$".to_owned(),
        _ => return None,
    })
}

fn uuid(version: &str) -> String {
    let variant = if version.len() == 1 { "[89abAB]" } else { "[0-9a-fA-F]" };
    format!("^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-{variant}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$")
}

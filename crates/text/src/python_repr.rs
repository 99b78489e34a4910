//! Values as Python writes them: `str` and `repr`.

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Deepest lists and dictionaries that are written; those of clients have 128 levels at most.
pub(crate) const MAX_LEVELS: usize = 256;

/// The value as text.
pub(crate) fn shown(state: &State, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => repr(state, value),
        ValueKind::Number => number(value),
        _ => Ok(value.to_string()),
    }
}

/// The value as an expression that gives it.
pub(crate) fn repr(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write(state, value, MAX_LEVELS, &mut out)?;
    Ok(out)
}

/// Floats as in `1e-05`.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    formatting::format(FormatStyle::StrFormat, "{}", std::slice::from_ref(value))
}

fn write(state: &State, value: &Value, levels: usize, out: &mut String) -> Result<(), Error> {
    // One list may be in another a million times.
    state.consume_fuel(1)?;
    let is_deep = levels == 0 && matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    if is_deep {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => out.push_str(&number(value)?),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Map => write_map(state, value, levels - 1, out)?,
        ValueKind::Seq | ValueKind::Iterable => write_items(state, value, levels - 1, out)?,
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Fails if the value has more levels than are written.
pub(crate) fn check_levels(state: &State, value: &Value, levels: usize) -> Result<(), Error> {
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map) {
        return Ok(());
    }
    let Some(inner) = levels.checked_sub(1) else { return Err(too_deep()) };
    state.consume_fuel(1 + value.len().unwrap_or(0) as u64 / 16)?;
    let mut items = value.try_iter()?;
    if kind == ValueKind::Seq {
        return items.try_for_each(|item| check_levels(state, &item, inner));
    }
    items.try_for_each(|key| check_levels(state, &value.get_item(&key)?, inner))
}

pub(crate) fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value has more than {MAX_LEVELS} levels"))
}

fn write_map(state: &State, map: &Value, levels: usize, out: &mut String) -> Result<(), Error> {
    out.push('{');
    for (index, key) in map.try_iter()?.enumerate() {
        out.push_str(if index == 0 { "" } else { ", " });
        write(state, &key, levels, out)?;
        out.push_str(": ");
        write(state, &map.get_item(&key)?, levels, out)?;
    }
    out.push('}');
    Ok(())
}

fn write_items(state: &State, items: &Value, levels: usize, out: &mut String) -> Result<(), Error> {
    let is_tuple = items.is_tuple();
    out.push(if is_tuple { '(' } else { '[' });
    for (index, item) in items.try_iter()?.enumerate() {
        out.push_str(if index == 0 { "" } else { ", " });
        write(state, &item, levels, out)?;
    }
    if is_tuple && items.len() == Some(1) {
        out.push(',');
    }
    out.push(if is_tuple { ')' } else { ']' });
    Ok(())
}

/// Single quotes, unless there are some in the text and no double ones.
fn quote(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => out.extend(['\\', quote]),
            _ if is_printable(character) => out.push(character),
            _ => out.push_str(&match character as u32 {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
}

/// Whether Python writes a character as it is. Rust knows by the same categories of Unicode, and
/// escapes a mark that joins a letter only at the beginning of a text.
pub(crate) fn is_printable(character: char) -> bool {
    match character {
        ' '..='~' => true,
        _ => !['a', character].iter().collect::<String>().escape_debug().any(|escaped| escaped == '\\'),
    }
}

//! Methods of Python's strings, lists and dictionaries that templates call.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use crate::python_repr::is_printable;
use crate::python_text::{self, Side};

/// Calls a method as Python does; what is not here is in the engine's own collection.
pub(crate) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let found = match value.kind() {
        ValueKind::String => match value.as_str() {
            Some(text) => string_method(state, text, method, args)?,
            None => None,
        },
        ValueKind::Seq => sequence_method(value, method, args)?,
        ValueKind::Map => map_method(value, method, args)?,
        _ => None,
    };
    match found {
        Some(found) => Ok(found),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn invalid(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Pays for data before it is made.
pub(crate) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

/// Arguments that may be given by name; `None` is as if not given.
pub(crate) fn named<const N: usize>(
    positional: Rest<Value>,
    kwargs: &Kwargs,
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    if positional.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut found = [const { None }; N];
    for (index, name) in names.iter().enumerate() {
        found[index] = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
    }
    kwargs.assert_all_used()?;
    Ok(found.map(|value| value.filter(|value| !value.is_none())))
}

/// Positional arguments by their names, beside those that were named.
pub(crate) fn by_name(positional: &[Value], kwargs: &Kwargs, names: &[&str]) -> Result<Kwargs, Error> {
    if positional.len() > names.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut all: Vec<(String, Value)> = Vec::new();
    for name in kwargs.args() {
        all.push((name.to_owned(), kwargs.get(name)?));
    }
    all.extend(names.iter().zip(positional).map(|(name, value)| ((*name).to_owned(), value.clone())));
    Ok(all.into_iter().collect())
}

fn method_arguments<const N: usize>(args: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (positional, kwargs): (Rest<Value>, Kwargs) = from_args(args)?;
    named(positional, &kwargs, names)
}

fn count(value: Option<Value>) -> Result<Option<usize>, Error> {
    // A negative count is no limit.
    value.map(i64::try_from).transpose().map(|count| count.and_then(|count| usize::try_from(count).ok()))
}

fn list(parts: Vec<&str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn three(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn string_method(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            let side = match method {
                "lstrip" => Side::Left,
                "rstrip" => Side::Right,
                _ => Side::Both,
            };
            Value::from(python_text::strip(text, characters, side))
        }
        "split" | "rsplit" => {
            let [separator, most] = method_arguments(args, ["sep", "maxsplit"])?;
            let most = count(most)?.unwrap_or(usize::MAX);
            let separator =
                separator.as_ref().map(|separator| separator.as_str().ok_or_else(|| invalid("sep is a string")));
            let separator = separator.transpose()?;
            if separator == Some("") {
                return Err(invalid("empty separator"));
            }
            let from_right = method == "rsplit";
            list(python_text::split(text, separator, most, from_right))
        }
        "splitlines" => {
            let [keep_ends] = method_arguments(args, ["keepends"])?;
            list(python_text::split_lines(text, keep_ends.is_some_and(|keep| keep.is_true())))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("empty separator"));
            }
            three(python_text::partition(text, separator, method == "rpartition"))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let found = python_text::find(text, part, start, end, method.starts_with('r'));
            match found {
                None if method.ends_with("index") => return Err(invalid("substring not found")),
                found => Value::from(found.map_or(-1, |at| at as i64)),
            }
        }
        "count" => {
            let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let within = python_text::between(text, start, end);
            Value::from(within.map_or(0, |(_, within)| within.matches(part).count()))
        }
        "startswith" | "endswith" if args.len() > 1 => {
            let (part, start, end): (Value, Option<i64>, Option<i64>) = from_args(args)?;
            match python_text::between(text, start, end).map(|(_, within)| within) {
                Some(within) => Value::from(has_edge(within, method == "startswith", part)?),
                None => Value::from(false),
            }
        }
        "zfill" | "center" | "ljust" | "rjust" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
            let mut characters = fill.chars();
            let (Some(fill), None) = (characters.next(), characters.next()) else {
                return Err(invalid("the fill character must be exactly one character long"));
            };
            let width = usize::try_from(width).unwrap_or(0);
            charge(state, width.saturating_mul(fill.len_utf8()))?;
            Value::from(match method {
                "zfill" => python_text::zero_fill(text, width),
                "center" => python_text::center(text, width, fill),
                "ljust" => python_text::pad(text, width, fill, Side::Right),
                _ => python_text::pad(text, width, fill, Side::Left),
            })
        }
        "expandtabs" => {
            let [size] = method_arguments(args, ["tabsize"])?;
            let size = size.map(i64::try_from).transpose()?.unwrap_or(8);
            let size = usize::try_from(size).unwrap_or(0);
            charge(state, size.saturating_mul(text.matches('\t').count()))?;
            Value::from(python_text::expand_tabs(text, size))
        }
        "format" => {
            let widths = python_text::numbers(text);
            charge(state, widths)?;
            return Ok(None);
        }
        "join" => {
            let (parts,): (&Value,) = from_args(args)?;
            if !parts.try_iter()?.all(|part| part.kind() == ValueKind::String) {
                return Err(invalid("join: expected strings"));
            }
            return Ok(None);
        }
        _ => return simple_string_method(text, method, args),
    }))
}

/// Whether a text begins or ends with a part, or with one of several.
fn has_edge(text: &str, at_start: bool, part: Value) -> Result<bool, Error> {
    let parts: Vec<Value> = if part.kind() == ValueKind::String { vec![part] } else { part.try_iter()?.collect() };
    let is_there = |part: &str| if at_start { text.starts_with(part) } else { text.ends_with(part) };
    Ok(parts.iter().filter_map(Value::as_str).any(is_there))
}

/// Methods without arguments.
fn simple_string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let all = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
    let found = match method {
        "title" => Value::from(python_text::title(text)),
        "swapcase" => Value::from(python_text::swap_case(text)),
        "casefold" => Value::from(python_text::case_fold(text)),
        "istitle" => Value::from(python_text::is_title(text)),
        "isspace" => all(python_text::is_space),
        "isdecimal" => all(python_text::is_decimal),
        "isdigit" => all(python_text::is_digit),
        "isprintable" => Value::from(text.chars().all(is_printable)),
        "isidentifier" => Value::from(python_text::is_identifier(text)),
        _ => return Ok(None),
    };
    let () = from_args(args)?;
    Ok(Some(found))
}

fn sequence_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (wanted, start, end): (Value, Option<usize>, Option<usize>) = from_args(args)?;
            let start = start.unwrap_or(0);
            let mut within = value.try_iter()?.enumerate().take(end.unwrap_or(usize::MAX)).skip(start);
            let found = within.find(|(_, item)| *item == wanted);
            let (at, _) = found.ok_or_else(|| invalid(format!("{wanted:?} is not in list")))?;
            Ok(Some(Value::from(at)))
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}

fn map_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if method != "copy" {
        return Ok(None);
    }
    let () = from_args(args)?;
    Ok(Some(value.clone()))
}

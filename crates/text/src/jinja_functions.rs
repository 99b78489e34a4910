//! Filters, tests and functions of Jinja2 that the template engine has not, or has otherwise.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, context, escape_formatter, filters};
use minijinja_contrib::{filters as more_filters, globals};

use crate::python_methods::{self, by_name, charge, named};
use crate::python_repr::{MAX_LEVELS, check_levels, repr, shown};
use crate::python_text::{self, is_space};
use crate::template_source::{ITEMS, MODULO, NAMED, PLUS, STORED, VARIADIC};
use crate::tojson::tojson;

/// The engine's own filter `format`.
const PRINTF: &str = "__printf";

/// Adds what Hugging Face's environment has.
pub(crate) fn add(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(python_methods::call);
    environment.set_formatter(write_value);
    environment.add_filter("tojson", tojson);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordcount", word_count);
    environment.add_filter("wordwrap", word_wrap);
    environment.add_filter("center", center);
    environment.add_filter("urlencode", url_encode);
    environment.add_filter("xmlattr", xml_attributes);
    environment.add_filter("striptags", more_filters::striptags);
    environment.add_filter("filesizeformat", file_size_format);
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_filter("forceescape", force_escape);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("sort", sort);
    environment.add_filter("unique", unique);
    environment.add_filter("format", format);
    environment.add_filter("string", string);
    environment.add_filter(PRINTF, filters::format);
    environment.add_filter(ITEMS, loop_items);
    environment.add_filter(STORED, stored);
    environment.add_filter("pprint", pretty);
    environment.add_filter(MODULO, modulo);
    environment.add_filter(PLUS, plus);
    environment.add_test("callable", is_callable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    // The engine's own, which Jinja2 has not.
    ["bool", "chain", "lines", "split", "zip"].iter().for_each(|name| environment.remove_filter(name));
    ["endingwith", "int", "safe", "startingwith"].iter().for_each(|name| environment.remove_test(name));
    environment.remove_global("debug");
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    environment.add_function("joiner", globals::joiner);
    environment.add_function(VARIADIC, variadic);
}

fn invalid(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// What a template says by `raise_exception`.
#[derive(Debug)]
pub(crate) struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(invalid(message).with_source(Raised))
}

/// Floats, lists and dictionaries are written as Python writes them.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            out.write_str(&shown(state, value)?).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// Texts stay safe if they are.
fn string(state: &State, value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String { Ok(value) } else { shown(state, &value).map(Value::from) }
}

/// What a variable gets.
fn stored(state: &State, value: Value) -> Result<Value, Error> {
    check_levels(state, &value, MAX_LEVELS)?;
    Ok(value)
}

/// What a loop goes through: Python refuses none, and the engine takes it for an empty list.
fn loop_items(state: &State, value: Value) -> Result<Value, Error> {
    if value.is_none() { Err(invalid("'None' is not iterable")) } else { stored(state, value) }
}

/// On one line, as Python writes short values. The engine's own takes hours for deep ones.
fn pretty(state: &State, value: &Value) -> Result<String, Error> {
    repr(state, value)
}

/// Functions and macros; so is what is not defined, in Python.
fn is_callable(value: &Value) -> bool {
    let is_macro = value.as_object().is_some_and(|object| object.type_name().ends_with("::Macro"));
    is_macro || matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined)
}

/// Whatever has a length and items, texts and dictionaries, too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// The operator `%`: texts format what is on its right, as in C.
fn modulo(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        return printf(state, text, &right).map(Value::from);
    }
    remainder(&left, &right).ok_or_else(|| {
        let problem = format!("tried to use % operator on {} and {}", left.kind(), right.kind());
        invalid(problem)
    })
}

fn format(state: &mut State, text: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let by_name: Vec<_> =
        kwargs.args().map(|name| Ok((name, kwargs.get::<Value>(name)?))).collect::<Result<_, Error>>()?;
    let values = if by_name.is_empty() { Value::from(Tuple::from(positional.0)) } else { Value::from_pairs(by_name) };
    printf(state, &shown(state, text)?, &values)
}

/// `%(key)-5.2f`.
struct Conversion<'t> {
    key: Option<&'t str>,
    flags: &'t str,
    letter: char,
    bytes: usize,
}

impl<'t> Conversion<'t> {
    /// Reads one at the beginning of a text.
    fn read(text: &'t str) -> Option<Self> {
        let mut at = 1;
        let mut key = None;
        if text[at..].starts_with('(') {
            let end = at + text[at..].find(')')?;
            key = Some(&text[at + 1..end]);
            at = end + 1;
        }
        let is_flag = |character: char| character.is_ascii_digit() || "#- +.*hlL".contains(character);
        let letter_at = at + text[at..].find(|character| !is_flag(character))?;
        let letter = text[letter_at..].chars().next()?;
        Some(Self { key, flags: &text[at..letter_at], letter, bytes: letter_at + letter.len_utf8() })
    }
}

/// Python's formatting; the engine's own does one conversion at a time.
fn printf(state: &mut State, text: &str, given: &Value) -> Result<String, Error> {
    let values: Vec<Value> = if given.is_tuple() { given.try_iter()?.collect() } else { vec![given.clone()] };
    let mut values = values.into_iter();
    let mut next = || values.next().ok_or_else(|| invalid("not enough arguments for format string"));
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let Some(conversion) = Conversion::read(&rest[at..]) else { return Err(invalid("incomplete format")) };
        rest = &rest[at + conversion.bytes..];
        if conversion.letter == '%' {
            out.push('%');
            continue;
        }
        let mut flags = String::new();
        for flag in conversion.flags.chars() {
            match flag {
                '*' => flags.push_str(&i64::try_from(next()?)?.to_string()),
                // Sizes in C; Python has one.
                'h' | 'l' | 'L' => {}
                _ => flags.push(flag),
            }
        }
        let value = match conversion.key {
            Some(key) => given.get_item(&Value::from(key)).ok().filter(|value| !value.is_undefined()),
            None => Some(next()?),
        };
        let value = value.ok_or_else(|| invalid(format!("no {:?} to format", conversion.key.unwrap_or_default())))?;
        let (letter, value) = convertible(state, conversion.letter, value)?;
        let formatted = state.apply_filter(PRINTF, &[Value::from(format!("%{flags}{letter}")), value])?;
        out.push_str(formatted.as_str().unwrap_or_default());
        charge(state, out.len())?;
    }
    let takes_keys = matches!(given.kind(), ValueKind::Map | ValueKind::Seq) && !given.is_tuple();
    if values.next().is_some() && !takes_keys {
        return Err(invalid("not all arguments converted during string formatting"));
    }
    Ok(out + rest)
}

/// The engine's conversion for one of Python's, and what it takes.
fn convertible(state: &State, letter: char, value: Value) -> Result<(char, Value), Error> {
    Ok(match letter {
        's' => ('s', Value::from(shown(state, &value)?)),
        'r' | 'a' => ('s', Value::from(repr(state, &value)?)),
        'd' | 'i' | 'u' => {
            let whole = integer(&value).or_else(|| as_float(&value).and_then(truncated));
            ('d', whole.map_or(value, Value::from))
        }
        _ => (letter, value),
    })
}

/// The operator `+`: of two texts, the one that is not said to be safe is escaped.
fn plus(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        charge(state, a.len() + b.len())?;
        return Ok(match (left.is_safe(), right.is_safe()) {
            (false, false) => Value::from(format!("{a}{b}")),
            (true, true) => Value::from_safe_string(format!("{a}{b}")),
            (true, false) => Value::from_safe_string(format!("{a}{}", escaped(b))),
            (false, true) => Value::from_safe_string(format!("{}{b}", escaped(a))),
        });
    }
    state.env().compile_expression("left + right")?.eval(context! { left, right })
}

/// The remainder has the sign of the divisor.
fn remainder(left: &Value, right: &Value) -> Option<Value> {
    if let (Some(left), Some(right)) = (integer(left), integer(right)) {
        let remainder = left.checked_rem(right)?;
        let is_other_sign = remainder != 0 && (remainder < 0) != (right < 0);
        return Some(Value::from(if is_other_sign { remainder + right } else { remainder }));
    }
    let right = as_float(right).filter(|right| *right != 0.0)?;
    let remainder = as_float(left)? % right;
    let is_other_sign = remainder != 0.0 && (remainder < 0.0) != (right < 0.0);
    Some(Value::from(if is_other_sign { remainder + right } else { remainder }))
}

fn integer(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

fn int(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let [default, base] = named(positional, &kwargs, ["default", "base"])?;
    refuse_undefined(value)?;
    let found = match value.as_str() {
        Some(text) => python_text::integer(text, number(base, 10)?).or_else(|| truncated(python_text::float(text)?)),
        None => integer(value).or_else(|| truncated(as_float(value)?)),
    };
    Ok(found.map_or_else(|| default.unwrap_or_else(|| Value::from(0)), Value::from))
}

fn float(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let [default] = named(positional, &kwargs, ["default"])?;
    refuse_undefined(value)?;
    let found = value.as_str().map_or_else(|| as_float(value), python_text::float);
    Ok(found.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from))
}

fn refuse_undefined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { Err(Error::new(ErrorKind::UndefinedError, "a number is needed")) } else { Ok(()) }
}

fn as_float(value: &Value) -> Option<f64> {
    let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if is_number {
        integer(value).map(|value| value as f64).or_else(|| f64::try_from(value.clone()).ok())
    } else {
        None
    }
}

fn truncated(value: f64) -> Option<i128> {
    (value.abs() < 1e38).then_some(value as i128)
}

fn dictsort(state: &State, value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let items = value.len().unwrap_or(0) as u64;
    state.consume_fuel(items.saturating_mul(u64::from(u64::BITS - items.leading_zeros())))?;
    filters::dictsort(value, by_name(&positional, &kwargs, &["case_sensitive", "by", "reverse"])?)
}

fn sort(state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    filters::sort(state, value, by_name(&positional, &kwargs, &["reverse", "case_sensitive", "attribute"])?)
}

fn unique(state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    filters::unique(state, value, by_name(&positional, &kwargs, &["case_sensitive", "attribute"])?)
}

fn escape(value: Value) -> Value {
    if value.is_safe() { value } else { force_escape(&value) }
}

fn force_escape(value: &Value) -> Value {
    Value::from_safe_string(escaped(&value.to_string()))
}

/// Lines after the first are indented; empty ones are if `blank` is given.
fn indent(state: &State, text: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let [width, first, blank] = named(positional, &kwargs, ["width", "first", "blank"])?;
    let indentation = match width.as_ref().and_then(Value::as_str) {
        Some(given) => given.to_owned(),
        None => {
            let spaces = number(width, 4)?;
            charge(state, spaces)?;
            " ".repeat(spaces)
        }
    };
    let is_wanted = |flag: &Option<Value>| flag.as_ref().is_some_and(Value::is_true);
    let text = format!("{text}\n");
    let lines = python_text::split_lines(&text, false);
    charge(state, lines.len().saturating_mul(indentation.len()))?;
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        let is_indented = if index == 0 { is_wanted(&first) } else { is_wanted(&blank) || !line.is_empty() };
        out.push_str(if index == 0 { "" } else { "\n" });
        out.push_str(if is_indented { &indentation } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

fn word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn word_count(text: &Value) -> usize {
    text.to_string().split(|character| !word(character)).filter(|word| !word.is_empty()).count()
}

fn number(value: Option<Value>, default: usize) -> Result<usize, Error> {
    value.map_or(Ok(default), usize::try_from)
}

fn truncate(text: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let names = ["length", "killwords", "end", "leeway"];
    let [length, kill_words, end, leeway] = named(positional, &kwargs, names)?;
    let text = text.to_string();
    let length = number(length, 255)?;
    let kill_words = kill_words.is_some_and(|kill| kill.is_true());
    let end = end.map_or_else(|| "...".to_owned(), |end| end.to_string());
    let leeway = number(leeway, 5)?;
    let end_length = end.chars().count();
    if length < end_length {
        return Err(invalid(format!("truncate: expected length >= {end_length}, got {length}")));
    }
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(length - end_length).collect();
    let kept = if kill_words { kept.as_str() } else { kept.rfind(' ').map_or(kept.as_str(), |at| &kept[..at]) };
    Ok(format!("{kept}{end}"))
}

fn center(state: &State, text: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let [width] = named(positional, &kwargs, ["width"])?;
    let width = number(width, 80)?;
    charge(state, width)?;
    Ok(python_text::center(&text.to_string(), width, ' '))
}

/// Lines are broken at white space and after hyphens.
fn word_wrap(state: &State, text: String, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, break_long_words, wrap_string, break_on_hyphens] = named(positional, &kwargs, names)?;
    let width = number(width, 79)?;
    let break_long_words = break_long_words.is_none_or(|wanted| wanted.is_true());
    let wrap_string = wrap_string.map_or_else(|| "\n".to_owned(), |end| end.to_string());
    let break_on_hyphens = break_on_hyphens.is_none_or(|wanted| wanted.is_true());
    if width == 0 {
        return Err(invalid("wordwrap: width must be above 0"));
    }
    let mut lines = Vec::new();
    for line in python_text::split_lines(&text, false) {
        let wrapped = wrapped(&chunks(line, break_on_hyphens), width, break_long_words);
        charge(state, wrapped.len().saturating_mul(wrap_string.len()))?;
        lines.push(wrapped.join(&wrap_string));
    }
    charge(state, lines.len().saturating_mul(wrap_string.len()))?;
    Ok(lines.join(&wrap_string))
}

/// Runs of white space, and words, cut after hyphens.
fn chunks(line: &str, break_on_hyphens: bool) -> Vec<Vec<char>> {
    let mut chunks: Vec<Vec<char>> = Vec::new();
    let characters: Vec<char> = line.chars().collect();
    for (at, &character) in characters.iter().enumerate() {
        let last = chunks.last_mut().filter(|last| {
            let previous = characters[at - 1];
            is_space(previous) == is_space(character) && !(break_on_hyphens && is_hyphenation(last, &characters[at..]))
        });
        match last {
            Some(last) => last.push(character),
            None => chunks.push(vec![character]),
        }
    }
    chunks
}

/// Whether a word may be cut here: two letters, a hyphen, and two letters.
fn is_hyphenation(before: &[char], after: &[char]) -> bool {
    let letter = |character: &char| word(*character) && !character.is_numeric();
    let [.., first, second, '-'] = before else { return false };
    let [third, fourth, ..] = after else { return false };
    word(*first) && letter(second) && word(*third) && letter(fourth)
}

fn wrapped(chunks: &[Vec<char>], width: usize, break_long_words: bool) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line: Vec<char> = Vec::new();
    let mut end = |line: &mut Vec<char>| {
        let kept: String = std::mem::take(line).into_iter().collect();
        let kept = kept.trim_end_matches(is_space);
        if !kept.is_empty() {
            lines.push(kept.to_owned());
        }
    };
    let mut is_first_line = true;
    for chunk in chunks {
        if line.len() + chunk.len() > width && (break_long_words || !line.is_empty()) {
            let is_long = chunk.len() > width && break_long_words;
            let mut rest = &chunk[..];
            if is_long {
                while !rest.is_empty() {
                    let (part, after) = rest.split_at(rest.len().min(width - line.len().min(width)));
                    line.extend(part);
                    rest = after;
                    if !rest.is_empty() {
                        end(&mut line);
                        is_first_line = false;
                    }
                }
                continue;
            }
            end(&mut line);
            is_first_line = false;
        }
        let is_leading_space = line.is_empty() && !is_first_line && chunk.iter().all(|character| is_space(*character));
        if !is_leading_space {
            line.extend(chunk);
        }
    }
    end(&mut line);
    lines
}

fn file_size_format(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let [binary] = named(positional, &kwargs, ["binary"])?;
    let bytes = value.as_str().map_or_else(|| as_float(value), python_text::float);
    let bytes = bytes.ok_or_else(|| invalid("filesizeformat: a number is needed"))?;
    Ok(more_filters::filesizeformat(bytes, binary.map(|binary| binary.is_true())))
}

/// Percent-encodes a text, or the pairs of a dictionary.
fn url_encode(value: &Value) -> Result<String, Error> {
    if matches!(value.kind(), ValueKind::String | ValueKind::Number) {
        return Ok(quoted(&value.to_string(), "/"));
    }
    let pairs: Vec<(Value, Value)> = if value.kind() == ValueKind::Map {
        value.try_iter()?.map(|key| Ok((key.clone(), value.get_item(&key)?))).collect::<Result<_, Error>>()?
    } else {
        let pair = |pair: Value| Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        value.try_iter()?.map(pair).collect::<Result<_, Error>>()?
    };
    let plus = |value: &Value| quoted(&value.to_string(), "").replace("%20", "+");
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| format!("{}={}", plus(key), plus(value))).collect();
    Ok(pairs.join("&"))
}

fn quoted(text: &str, safe: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let character = char::from(byte);
        if character.is_ascii_alphanumeric() || "_.-~".contains(character) || safe.contains(character) {
            out.push(character);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Attributes of an XML element; those that are none or undefined are left out.
fn xml_attributes(value: &Value, auto_space: Option<bool>) -> Result<String, Error> {
    if value.kind() != ValueKind::Map {
        return Err(invalid("xmlattr: a dictionary is needed"));
    }
    let mut out = String::new();
    for key in value.try_iter()? {
        let name = key.to_string();
        if name.contains(|character: char| is_space(character) || "/>=".contains(character)) {
            return Err(invalid(format!("xmlattr: invalid character in attribute name {name:?}")));
        }
        let item = value.get_item(&key)?;
        if !item.is_none() && !item.is_undefined() {
            let separator = if out.is_empty() { "" } else { " " };
            out.push_str(&format!("{separator}{}=\"{}\"", escaped(&name), escaped(&item.to_string())));
        }
    }
    let space = if auto_space.unwrap_or(true) && !out.is_empty() { " " } else { "" };
    Ok(format!("{space}{out}"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('>', "&gt;").replace('<', "&lt;").replace('\'', "&#39;").replace('"', "&#34;")
}

/// A macro that takes arguments it has no names for, as `varargs` and `kwargs`.
#[derive(Debug)]
struct Variadic {
    inner: Value,
    names: Vec<String>,
}

fn variadic(inner: Value, names: Vec<String>) -> Value {
    Value::from_object(Variadic { inner, names })
}

impl Object for Variadic {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        if key.as_str() != Some("name") {
            return None;
        }
        let name = self.inner.get_attr("name").ok()?;
        Some(Value::from(name.as_str()?.trim_end_matches(NAMED)))
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (Rest(mut positional), kwargs): (Rest<Value>, Kwargs) = from_args(args)?;
        let more = positional.split_off(positional.len().min(self.names.len()));
        let mut known = vec![("varargs".to_owned(), Value::from(Tuple::from(more)))];
        let mut others = Vec::new();
        for name in kwargs.args() {
            let pair = (name.to_owned(), kwargs.get::<Value>(name)?);
            let is_known = name == "caller" || self.names.iter().any(|known| known == name);
            if is_known { known.push(pair) } else { others.push(pair) }
        }
        known.push(("kwargs".to_owned(), Value::from_pairs(others)));
        positional.push(known.into_iter().collect::<Kwargs>().into());
        self.inner.call(state, &positional)
    }
}

//! The template filter `tojson` as Hugging Face defines it: Python's `json.dumps(value,
//! ensure_ascii=False)`, not the HTML-safe one of the template engine.

use std::io;

use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use crate::python_methods::by_name;
use crate::python_repr::{MAX_LEVELS, too_deep};

/// Deepest indentation step, and longest separator, bytes.
const MAX_INDENT: usize = 16;

/// `value | tojson`, with the arguments `ensure_ascii`, `indent`, `separators` and `sort_keys` of
/// `json.dumps`, in this order or by name.
pub(crate) fn tojson(state: &State, value: Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let kwargs = by_name(&positional, &kwargs, &["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let formatter = PythonFormatter::new(&kwargs)?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    check(state, &value, MAX_LEVELS)?;
    let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
    let mut out = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut out, formatter);
    let written = if sort_keys {
        serde_json::to_value(&value).and_then(|mut json| {
            json.sort_all_objects();
            json.serialize(&mut serializer)
        })
    } else {
        value.serialize(&mut serializer)
    };
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(out).map_err(|error| failed(error.to_string()))
}

/// Python's encoder refuses what is undefined, functions and iterators.
fn check(state: &State, value: &Value, levels: usize) -> Result<(), Error> {
    state.consume_fuel(1)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Map if levels == 0 => Err(too_deep()),
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| check(state, &item, levels - 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| check(state, &value.get_item(&key)?, levels - 1)),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String => Ok(()),
        kind => Err(Error::new(ErrorKind::BadSerialization, format!("tojson: {kind} is no JSON"))),
    }
}

/// JSON as Python writes it.
struct PythonFormatter {
    item_separator: String,
    key_separator: String,
    /// Each item is on a line of its own, after this for each level.
    indent: Option<String>,
    ensure_ascii: bool,
    depth: usize,
    /// Nothing was written since a list or map began.
    is_empty: bool,
}

impl PythonFormatter {
    fn new(kwargs: &Kwargs) -> Result<Self, Error> {
        let indent = kwargs.get::<Option<Value>>("indent")?.map(|indent| indentation(&indent)).transpose()?;
        let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
        let (item_separator, key_separator) = match kwargs.get::<Option<Vec<String>>>("separators")?.as_deref() {
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some([item, key]) if item.len().max(key.len()) <= MAX_INDENT => (item.clone(), key.clone()),
            Some(_) => {
                let problem = format!("tojson: separators are two strings of at most {MAX_INDENT} bytes");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        };
        Ok(Self { item_separator, key_separator, indent, ensure_ascii, depth: 0, is_empty: true })
    }

    fn begin(&mut self) {
        self.depth += 1;
        self.is_empty = true;
    }

    fn item<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            writer.write_all(self.item_separator.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn end<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if std::mem::take(&mut self.is_empty) { Ok(()) } else { self.new_line(writer) }
    }

    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }
}

/// A string, or a number of spaces.
fn indentation(indent: &Value) -> Result<String, Error> {
    let indent = match (indent.as_str(), indent.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(spaces)) => " ".repeat(usize::try_from(spaces).unwrap_or(0).min(MAX_INDENT)),
        (None, None) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is a number or a string"));
        }
    };
    if indent.len() > MAX_INDENT {
        let problem = format!("tojson: indent has {} bytes, but at most {MAX_INDENT} are taken", indent.len());
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(indent)
}

impl Formatter for PythonFormatter {
    /// Python writes `1e-07`, and numbers that are none by name.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = formatting::format(FormatStyle::StrFormat, "{}", &[Value::from(value)]).map_err(io::Error::other)?;
        writer.write_all(text.as_bytes())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin();
        writer.write_all(b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer)?;
        writer.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin();
        writer.write_all(b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer)?;
        writer.write_all(b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key_separator.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for character in fragment.chars() {
            match character {
                ' '..='~' => writer.write_all(&[character as u8])?,
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    #[test]
    fn tojson_writes_floats_as_python_does() {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let text = environment.render_str("{{ [1e-7, 1.0, 1e22, 0.1, 123456789.125] | tojson }}", ()).unwrap();
        assert_eq!(text, "[1e-07, 1.0, 1e+22, 0.1, 123456789.125]");
    }

    /// Of a value with all kinds of JSON in it.
    fn dumped(arguments: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let value = r#"{'b': [1, 2.5, true, none, [], {}], 'a': {'é😀': 'x\n"\\\x7f', 'B': [[]]}}"#;
        environment.render_str(&format!("{{{{ {value} | tojson{arguments} }}}}"), ())
    }

    #[test]
    fn tojson_keyword_arguments_match_python() {
        // Python 3.12: json.dumps(value, **{'ensure_ascii': False, ...}).
        let cases = [
            ("", "{\"b\": [1, 2.5, true, null, [], {}], \"a\": {\"é😀\": \"x\\n\\\"\\\\\u{7f}\", \"B\": [[]]}}"),
            (
                "(ensure_ascii=true)",
                r#"{"b": [1, 2.5, true, null, [], {}], "a": {"\u00e9\ud83d\ude00": "x\n\"\\\u007f", "B": [[]]}}"#,
            ),
            (
                "(sort_keys=True, separators=(',', ':'))",
                "{\"a\":{\"B\":[[]],\"é😀\":\"x\\n\\\"\\\\\u{7f}\"},\"b\":[1,2.5,true,null,[],{}]}",
            ),
            (
                "(indent=2)",
                "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null,\n    [],\n    {}\n  ],\n  \"a\": {\n    \"é😀\": \"x\\n\\\"\\\\\u{7f}\",\n    \"B\": [\n      []\n    ]\n  }\n}",
            ),
            (
                "(indent='\t', separators=['; ', '='], ensure_ascii=False, sort_keys=false)",
                "{\n\t\"b\"=[\n\t\t1; \n\t\t2.5; \n\t\ttrue; \n\t\tnull; \n\t\t[]; \n\t\t{}\n\t]; \n\t\"a\"={\n\t\t\"é😀\"=\"x\\n\\\"\\\\\u{7f}\"; \n\t\t\"B\"=[\n\t\t\t[]\n\t\t]\n\t}\n}",
            ),
            (
                "(indent=0)",
                "{\n\"b\": [\n1,\n2.5,\ntrue,\nnull,\n[],\n{}\n],\n\"a\": {\n\"é😀\": \"x\\n\\\"\\\\\u{7f}\",\n\"B\": [\n[]\n]\n}\n}",
            ),
        ];
        for (arguments, expected) in cases {
            assert_eq!(dumped(arguments).unwrap(), expected, "{arguments}");
        }
        assert_eq!(dumped("(indent=none, separators=none, sort_keys=none)").unwrap(), dumped("").unwrap());
        assert_eq!(dumped("(indent=-1)").unwrap(), dumped("(indent=0)").unwrap());
    }

    #[test]
    fn invalid_tojson_arguments_are_refused() {
        for arguments in [
            "(indent=[])",
            "(separators=(',',))",
            "(separators=('x' * 17, ':'))",
            "(indent='x' * 17)",
            "(skipkeys=true)",
        ] {
            assert!(dumped(arguments).is_err(), "{arguments}");
        }
    }
}

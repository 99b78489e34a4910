//! Schemas that clients send are held to, or refused with their place.

// Tests read the clock.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_grammar::{Answer, Calls, CheckedGrammar, Effort, Form, GrammarCompiler, GrammarError, Thoughts, Tool};
use baton_text::{OutputFormat, Tokenizer};
use serde_json::{Map, Value, json};

/// Compiles schemas of answers and of tools.
struct Checker {
    tokenizer: Tokenizer,
    compiler: GrammarCompiler,
    format: OutputFormat,
}

impl Checker {
    fn new() -> Self {
        let tokenizer = Tokenizer::bytes();
        let compiler = GrammarCompiler::new(&tokenizer).expect("bytes are a vocabulary");
        let format = OutputFormat::detect("{{ tools }}<tool_call></tool_call>", &tokenizer);
        Self { tokenizer, compiler, format }
    }

    fn checked(&self, form: Option<Form>, calls: Calls) -> Result<CheckedGrammar, GrammarError> {
        let thoughts = Thoughts::Over;
        let (format, tokenizer) = (&self.format, &self.tokenizer);
        let answer = Answer { format, tokenizer, thoughts, form, calls, one_call: true };
        answer.checked_grammar(&self.compiler, Effort::Full).map(|grammar| grammar.expect("there is a form"))
    }

    fn plain(&self, schema: &Value) -> Result<CheckedGrammar, GrammarError> {
        self.checked(Some(Form::JsonSchema(schema.to_string())), Calls::None)
    }

    fn strict(&self, schema: &Value) -> Result<CheckedGrammar, GrammarError> {
        self.checked(Some(Form::StrictJsonSchema(schema.to_string())), Calls::None)
    }

    fn tool(&self, schema: &Value, is_strict: bool) -> Result<CheckedGrammar, GrammarError> {
        let Value::Object(parameters) = schema.clone() else { panic!("{schema} is no object") };
        self.checked(None, Calls::Must(vec![Tool { name: "f".to_owned(), parameters, is_strict }]))
    }

    fn takes(&self, grammar: &Arc<str>, text: &str) -> bool {
        let mut matcher = self.compiler.compile(grammar).expect("it compiled before");
        let tokens: Vec<_> = text.bytes().map(u32::from).collect();
        matcher.take(&tokens).is_ok() && matcher.mask().is_ok_and(|mask| mask.allows(257))
    }

    /// Values that a schema has to take, and values that it must not.
    fn check(&self, schema: &Value, taken: &[&str], refused: &[&str]) {
        let grammar = self.plain(schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        for text in taken {
            assert!(self.takes(&grammar.text, text), "{schema}: {text} of {}", grammar.text);
        }
        for text in refused {
            assert!(!self.takes(&grammar.text, text), "{schema}: {text} of {}", grammar.text);
        }
    }
}

#[test]
fn keywords_that_are_true_of_every_value_are_nothing() {
    let checker = Checker::new();
    let of_strings = json!({ "type": "object", "properties": { "a": { "type": "string" } }, "required": ["a"] });
    let bare = checker.plain(&of_strings).unwrap().text;
    for (keyword, value) in [
        ("propertyNames", json!({ "type": "string" })),
        ("propertyNames", json!(true)),
        ("propertyNames", json!({})),
        ("propertyNames", json!({ "type": ["string", "null"], "title": "name" })),
        ("propertyNames", json!({ "$ref": "#/$defs/name" })),
        ("uniqueItems", json!(false)),
        ("minProperties", json!(0)),
        ("minLength", json!(0)),
        ("minItems", json!(0.0)),
        ("patternProperties", json!({})),
        ("dependentRequired", json!({ "a": [] })),
        ("dependentSchemas", json!({ "a": true })),
        ("dependencies", json!({ "a": {} })),
        ("unevaluatedProperties", json!(true)),
        ("unevaluatedItems", json!({})),
        ("additionalProperties", json!(true)),
        ("not", json!(false)),
        ("not", json!({ "not": {} })),
        ("not", json!({ "not": true })),
        ("if", json!({ "minProperties": 3 })),
        ("then", json!({ "required": ["b"] })),
        ("minContains", json!(3)),
        ("exclusiveMinimum", json!(false)),
        ("anyOf", json!([{ "type": "string" }, {}])),
        ("nullable", json!(false)),
        ("dependentRequired", json!({})),
        ("deprecated", json!(true)),
        ("readOnly", json!(true)),
        ("discriminator", json!({ "propertyName": "a" })),
        ("x-order", json!(["a"])),
        ("contentMediaType", json!("application/json")),
        ("contentSchema", json!({ "type": "number" })),
        ("$comment", json!("c")),
        ("$anchor", json!("here")),
        ("$dynamicAnchor", json!("here")),
        ("examples", json!([{ "a": 1 }])),
        ("$vocabulary", json!({})),
        ("example", json!(1)),
        ("definitions", json!({ "b": { "not": { "not": { "uniqueItems": true } } } })),
        ("propertyNames", json!({ "allOf": [{ "type": "string" }, { "minLength": 0 }] })),
        ("propertyNames", json!({ "anyOf": [{ "type": "integer" }, { "type": "string" }] })),
        ("propertyNames", json!({ "oneOf": [{ "type": "null" }, { "type": "string", "maximum": 3 }] })),
        ("propertyNames", json!({ "pattern": ".*", "minLength": 0, "format": "password" })),
        ("propertyNames", json!({ "type": "string", "required": ["b"], "not": { "type": "null" } })),
        ("if", json!(false)),
        ("if", json!({ "type": "array" })),
        ("else", json!({ "required": ["b"] })),
        ("dependentRequired", json!({ "b": ["a"], "c": ["c", "a"] })),
        ("dependencies", json!({ "b": ["a"], "c": { "required": ["a"], "type": "object" } })),
        ("dependentSchemas", json!({ "b": { "required": ["a"], "minLength": 3 } })),
        ("not", json!({ "enum": [] })),
        ("not", json!({ "type": ["null", "string"] })),
        ("not", json!({ "const": "a" })),
        ("not", json!({ "type": "object", "properties": { "a": { "const": 1 } }, "required": ["a"] })),
        ("not", json!({ "anyOf": [false, { "type": "integer" }] })),
        ("contains", json!({ "type": "string" })),
        ("uniqueItems", json!(true)),
        ("unevaluatedItems", json!(false)),
        ("items", json!({ "pattern": r"(?<=a)b" })),
        ("pattern", json!(r"(?<=a)b")),
        ("multipleOf", json!(999_983)),
    ] {
        let mut schema = of_strings.clone();
        schema["$defs"] = json!({ "name": { "type": "string", "description": "a name" } });
        schema[keyword] = value.clone();
        let grammar = checker.plain(&schema).unwrap_or_else(|error| panic!("{keyword}: {value}: {error}"));
        assert_eq!(grammar.text, bare, "{keyword}: {value}");
        checker.strict(&schema).unwrap_or_else(|error| panic!("strict: {keyword}: {value}: {error}"));
    }
    // Keywords of other types, and what no value of the types has.
    for (of_type, keyword, value) in [
        ("string", "uniqueItems", json!(true)),
        ("string", "contains", json!({ "const": 1 })),
        ("string", "unevaluatedItems", json!(false)),
        ("string", "unevaluatedProperties", json!(false)),
        ("string", "dependencies", json!({ "a": ["b"] })),
        ("string", "dependentRequired", json!({ "a": ["b"] })),
        ("string", "dependentSchemas", json!({ "a": { "required": ["b"] } })),
        ("string", "patternProperties", json!({ "(?<!a)": true })),
        ("string", "multipleOf", json!(999_983)),
        ("string", "not", json!({ "type": "null" })),
        ("string", "not", json!({ "type": "array", "items": { "type": "string" } })),
        ("array", "dependentRequired", json!({ "a": ["b"] })),
        ("array", "propertyNames", json!({ "not": { "const": "a" } })),
        ("array", "not", json!({ "enum": ["a", 1, null] })),
        ("integer", "uniqueItems", json!(true)),
        ("integer", "pattern", json!(r"(?<=a)b")),
        ("integer", "not", json!({ "type": "string" })),
        ("number", "dependencies", json!({ "a": ["b"] })),
    ] {
        let bare = checker.plain(&json!({ "type": of_type })).unwrap().text;
        let grammar = checker.plain(&json!({ "type": of_type, keyword: value }));
        assert_eq!(grammar.unwrap().text, bare, "{of_type}, {keyword}: {value}");
    }
    let listed = json!({ "enum": ["a", "b"], "uniqueItems": true, "not": { "enum": ["c", null] } });
    checker.check(&listed, &["\"a\""], &["\"c\"", "null"]);
    checker.check(&json!({ "type": "array", "contains": {}, "minContains": 0 }), &["[]", "[1]"], &["{}"]);
    checker.check(&json!({ "type": "integer", "multipleOf": 1 }), &["7"], &["7.5"]);
    checker.check(&json!({ "type": "array", "uniqueItems": true, "maxItems": 1 }), &["[1]"], &["[1, 2]"]);
    checker.check(&json!({ "type": "string", "nullable": true }), &["null", "\"a\""], &["1"]);
    let array = |more: Value| {
        let mut array = json!({ "type": "array", "maxItems": 2, "minItems": 1 });
        array.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        array
    };
    for more in [
        json!({ "contains": {} }),
        json!({ "contains": true, "maxContains": 2 }),
        json!({ "contains": false, "minContains": 0, "maxContains": 0 }),
        json!({ "contains": { "const": 1 }, "minContains": 0, "maxContains": 3 }),
        json!({ "unevaluatedItems": false, "items": true }),
        json!({ "unevaluatedItems": false, "prefixItems": [true, true] }),
        json!({ "unevaluatedItems": false, "items": [true], "additionalItems": true }),
        json!({ "uniqueItems": true, "prefixItems": [{ "type": "integer" }, { "const": "a" }] }),
        json!({ "uniqueItems": true, "prefixItems": [{ "type": "integer" }], "items": false }),
    ] {
        checker.check(&array(more), &["[1]"], &["[]", "[1, \"a\", 2]"]);
    }
}

#[test]
fn conditions_that_always_or_never_hold_are_what_they_lead_to() {
    let checker = Checker::new();
    let a = json!({ "type": "object", "required": ["a"], "properties": { "a": { "type": "integer" } } });
    for (condition, holds) in [
        (json!(true), true),
        (json!({}), true),
        (json!({ "type": "object" }), true),
        (json!({ "required": ["a"], "properties": {} }), true),
        (json!(false), false),
        (json!({ "type": ["array", "null"] }), false),
        (json!({ "properties": { "a": { "type": "string" } }, "required": ["a"], "type": "object" }), false),
    ] {
        let mut schema = a.clone();
        schema["if"] = condition.clone();
        schema["then"] = json!({ "required": ["b"] });
        schema["else"] = json!({ "required": ["c"] });
        let [taken, refused] = if holds { ["b", "c"] } else { ["c", "b"] };
        let of = |name: &str| format!("{{\"a\": 1, \"{name}\": 1}}");
        checker.check(&schema, &[&of(taken)], &[&of(refused), "{\"b\": 1, \"c\": 1}"]);
    }
    let named = json!({ "type": "object", "if": {}, "then": { "properties": { "a": { "type": "integer" } } } });
    let strict = checker.strict(&named).unwrap().text;
    assert!(checker.takes(&strict, "{\"a\": 1}") && !checker.takes(&strict, "{\"b\": 1}"), "{strict}");
}

#[test]
fn keywords_that_say_something_are_not_taken_for_nothing() {
    let checker = Checker::new();
    for (schema, keyword) in [
        (json!({ "type": "number", "not": { "type": "integer" } }), "not"),
        (json!({ "type": "integer", "not": { "type": "number", "minimum": 3 } }), "not"),
        (json!({ "type": "string", "nullable": true, "not": { "type": "null" } }), "not"),
        (json!({ "not": { "type": "null" } }), "not"),
        (json!({ "type": ["string", "null"], "not": { "type": "null" } }), "not"),
        (
            json!({ "$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "definitions": { "a": true },
            "not": { "$ref": "#/definitions/a", "type": "null" } }),
            "not",
        ),
        (json!({ "type": ["string", "array"], "uniqueItems": true }), "uniqueItems"),
        (json!({ "type": "array", "uniqueItems": true, "maxItems": 2 }), "uniqueItems"),
        (
            json!({ "type": "array", "uniqueItems": true, "prefixItems": [{ "const": 1 }, { "const": 2 }] }),
            "uniqueItems",
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "items": false, "prefixItems": [{ "const": 1 }, { "type": "integer" }] }),
            "uniqueItems",
        ),
        (json!({ "type": "array", "contains": {} }), "contains"),
        (json!({ "type": "array", "contains": {}, "minItems": 1, "minContains": 2 }), "contains"),
        (json!({ "type": "array", "contains": {}, "minItems": 1, "maxContains": 2 }), "contains"),
        (json!({ "type": "array", "contains": { "const": 1 }, "minItems": 1 }), "contains"),
        (
            json!({ "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "contains": { "const": 1 }, "minContains": 0 }),
            "contains",
        ),
        (json!({ "type": "object", "dependentRequired": { "a": ["a", "b"] }, "required": ["a"] }), "dependentRequired"),
        (json!({ "dependentRequired": { "a": ["b"] } }), "dependentRequired"),
        (json!({ "type": "object", "dependencies": { "a": { "required": ["b"] } } }), "dependencies"),
        (json!({ "type": "object", "dependentSchemas": { "a": { "type": "array" } } }), "dependentSchemas"),
        (json!({ "type": "object", "dependentSchemas": { "a": { "minProperties": 2 } } }), "dependentSchemas"),
        (json!({ "type": ["object", "null"], "if": { "type": "object" }, "then": { "required": ["a"] } }), "if"),
        (json!({ "type": "object", "if": { "required": ["a"] }, "then": { "required": ["b"] } }), "if"),
        (json!({ "type": "number", "if": { "type": "integer" }, "then": { "minimum": 1 } }), "if"),
        (
            json!({ "type": "array", "prefixItems": [true], "maxItems": 2, "unevaluatedItems": false }),
            "unevaluatedItems",
        ),
        (
            json!({ "type": "object", "propertyNames": { "oneOf": [{ "type": "string" }, { "minLength": 1 }] } }),
            "propertyNames/oneOf",
        ),
        (
            json!({ "type": "object", "propertyNames": { "anyOf": [{ "pattern": "^a" }, { "type": "null" }] } }),
            "propertyNames/anyOf",
        ),
        (json!({ "type": "object", "propertyNames": { "not": { "const": "a" } } }), "propertyNames/not"),
    ] {
        let error = checker.plain(&schema).expect_err(&schema.to_string()).to_string();
        assert_eq!(error.split(": ").next(), Some(&*format!("the schema at #/{keyword}")), "{schema}: {error}");
    }
}

#[test]
fn names_of_properties_are_listed_matched_or_refused() {
    let checker = Checker::new();
    let color = json!({ "$defs": { "Color": { "enum": ["red", "blue"], "type": "string" } }, "type": "object",
        "propertyNames": { "$ref": "#/$defs/Color" }, "additionalProperties": { "type": "integer" } });
    checker.check(
        &color,
        &["{}", r#"{"red": 1}"#, r#"{"red": 1, "blue": 2}"#],
        &[r#"{"green": 1}"#, r#"{"red": "x"}"#],
    );
    let object = |names: Value| json!({ "type": "object", "propertyNames": names, "additionalProperties": { "type": "integer" } });
    checker.check(&object(json!({ "const": "a" })), &[r#"{"a": 1}"#], &[r#"{"b": 1}"#]);
    checker.check(&object(json!({ "pattern": "^k" })), &["{}", r#"{"k1": 1}"#], &[r#"{"a": 1}"#, r#"{"k": ""}"#]);
    let lengths = object(json!({ "minLength": 2, "maxLength": 3 }));
    checker.check(&lengths, &[r#"{"ab": 1}"#], &[r#"{"a": 1}"#, r#"{"abcd": 1}"#]);
    checker.check(&object(json!(false)), &["{}"], &[r#"{"a": 1}"#]);
    let mut with_named = object(json!({ "enum": ["a", "b"] }));
    with_named["properties"] = json!({ "a": { "type": "string" }, "c": true });
    checker.check(&with_named, &[r#"{"a": "x", "b": 1}"#], &[r#"{"a": 1}"#, r#"{"c": 1}"#, r#"{"d": 1}"#]);
    let day = object(json!({ "format": "date" }));
    checker.check(&day, &[r#"{"2026-11-28": 1}"#], &[r#"{"today": 1}"#]);
    for (names, place) in [
        (json!({ "allOf": [{ "pattern": "^a" }] }), "/propertyNames/allOf"),
        (json!({ "not": { "enum": ["a"] } }), "/propertyNames/not"),
        (json!({ "pattern": "^a", "minLength": 2 }), "/propertyNames/minLength"),
        (json!({ "pattern": "^(?=a)(?=.*b)" }), "/propertyNames/pattern"),
        (json!({ "format": "email" }), "/propertyNames/format"),
    ] {
        let error = checker.plain(&object(names.clone())).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the schema at #{place}: ")), "{error}");
        assert_eq!(checker.tool(&object(names), false).unwrap().dropped.len(), 1);
    }
    // Names of closed objects are tried by themselves.
    for (names, taken, refused) in [
        (json!({ "minLength": 1 }), [r#"{"a": 1}"#, r#"{"größe": 1, "a": 1}"#], r#"{"b": 1}"#),
        (json!({ "minLength": 5, "maxLength": 5 }), ["{}", r#"{"größe": 1}"#], r#"{"a": 1}"#),
        (json!({ "pattern": "^.*$" }), [r#"{"a": 1}"#, r#"{"größe": 1}"#], r#"{"b": 1}"#),
        (json!({ "pattern": "^[a-z]$" }), ["{}", r#"{"a": 1}"#], r#"{"größe": 1}"#),
        (json!({ "pattern": "(?=r)..ß" }), ["{}", r#"{"größe": 1}"#], r#"{"a": 1}"#),
        (json!({ "format": "date" }), ["{}", "{ }"], r#"{"a": 1}"#),
    ] {
        let closed = json!({ "type": "object", "propertyNames": names, "additionalProperties": false,
            "properties": { "größe": { "type": "integer" }, "a": { "type": "integer" } } });
        checker.check(&closed, &taken, &[refused]);
    }
    // The library panics on this search.
    let twice = json!({ "type": "object", "propertyNames": { "pattern": "^(?:(?:ab){2}|abab)$" },
        "additionalProperties": false, "properties": { "abab": {} } });
    if let Err(error) = checker.plain(&twice) {
        assert!(error.to_string().starts_with("the schema at #/propertyNames"), "{error}");
    }
    checker.tool(&twice, false).unwrap();
    for names in [json!({ "format": "date", "pattern": ".*" }), json!({ "format": "date" })] {
        checker.check(&object(names), &[r#"{"2026-11-28": 1}"#], &[r#"{"today": 1}"#]);
    }
    let unknown = object(json!({ "format": "colour" }));
    checker.plain(&unknown).unwrap();
    assert!(checker.strict(&unknown).unwrap_err().to_string().contains("#/propertyNames/format"));
    let open = json!({ "type": "object", "propertyNames": { "minLength": 1 }, "properties": { "a": true } });
    assert!(checker.plain(&open).unwrap_err().to_string().starts_with("the schema at #/propertyNames: "));
    for none in [json!({ "type": "integer" }), json!({ "enum": [1, null] }), json!({ "not": { "minLength": 0 } })] {
        checker.check(&object(none), &["{}"], &[r#"{"a": 1}"#]);
    }
    let mut beside_patterns = object(json!({ "enum": ["a"] }));
    beside_patterns["patternProperties"] = json!({ "^a": true });
    let error = checker.plain(&beside_patterns).unwrap_err().to_string();
    assert!(error.starts_with("the schema at #/propertyNames: "), "{error}");
}

#[test]
fn one_of_is_any_of_if_no_value_is_of_two() {
    let checker = Checker::new();
    let union = |one_of: Value| {
        json!({ "oneOf": one_of, "discriminator": { "propertyName": "kind" }, "$defs": {
        "A": { "type": "object", "properties": { "kind": { "const": "a" } }, "required": ["kind"] },
        "B": { "type": "object", "properties": { "kind": { "enum": ["b", "c"], "default": "b" } } },
        "AorB": { "oneOf": [{ "$ref": "#/$defs/A" }, { "$ref": "#/$defs/B" }] },
        "D": { "type": "object", "properties": { "kind": { "const": 1 } }, "required": ["kind"] } } })
    };
    let refs = json!([{ "$ref": "#/$defs/A" }, { "$ref": "#/$defs/B" }, { "type": "null" }]);
    checker.check(&union(refs), &[r#"{"kind": "a"}"#, r#"{"kind": "c"}"#, "null"], &[r#"{"kind": "d"}"#]);
    let nested = json!([{ "$ref": "#/$defs/AorB" }, { "$ref": "#/$defs/D" }]);
    checker.check(&union(nested), &[r#"{"kind": "a"}"#, r#"{"kind": 1}"#], &[r#"{"kind": 2}"#]);
    let overlapping = json!([{ "$ref": "#/$defs/A" }, { "type": "object" }]);
    let error = checker.plain(&union(overlapping)).unwrap_err().to_string();
    assert!(error.starts_with("the schema at #: oneOf is taken if"), "{error}");
    // What the library tells apart by itself.
    let object = |name: &str| json!({ "properties": { name: {} }, "required": [name], "additionalProperties": false, "type": "object" });
    checker.check(
        &json!({ "oneOf": [object("a"), object("b")] }),
        &[r#"{"a": 1}"#, r#"{"b": 1}"#],
        &[r#"{"a": 1, "b": 1}"#],
    );
}

#[test]
fn references_are_found_by_pointer_anchor_and_identifier() {
    let checker = Checker::new();
    for schema in [
        json!({ "$ref": "#/$defs/a~1b%25", "$defs": { "a/b%": { "type": "integer" } } }),
        json!({ "$ref": "#here", "$defs": { "x": { "$anchor": "here", "type": "integer" } } }),
        json!({ "$id": "https://a.example/x/root.json", "$ref": "item.json#/$defs/n",
            "$defs": { "x": { "$id": "item.json", "$defs": { "n": { "type": "integer" } } } } }),
        json!({ "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "type": "string", "definitions": { "x": { "type": "integer" } } }),
    ] {
        checker.check(&schema, &["1"], &["\"a\"", "1.5"]);
    }
    // TypeBox's recursive types name themselves.
    let node = json!({ "$id": "Node", "type": "object", "properties": { "inner": { "$ref": "Node" } }, "additionalProperties": false });
    checker.check(
        &json!({ "items": node, "type": "array" }),
        &[r#"[{"inner": {"inner": {}}}]"#],
        &[r#"[{"inner": 1}]"#],
    );
}

#[test]
fn strict_schemas_have_no_properties_but_those_they_name() {
    let checker = Checker::new();
    let schema = json!({ "type": "object", "properties": { "a": { "$ref": "#/$defs/Inner" }, "free": { "type": "object", "additionalProperties": true } },
        "required": ["a"], "$defs": { "Inner": { "allOf": [{ "$ref": "#/$defs/Base" }, { "properties": { "y": { "type": "integer" } } }] },
        "Base": { "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"] } } });
    let taken = [r#"{"a": {"x": 1, "y": 2}}"#, r#"{"a": {"x": 1}, "free": {"z": 1}}"#];
    let open = [r#"{"a": {"x": 1}, "b": 1}"#, r#"{"a": {"x": 1, "z": 2}}"#];
    let strict = checker.strict(&schema).unwrap().text;
    let plain = checker.plain(&schema).unwrap().text;
    for text in taken {
        assert!(checker.takes(&strict, text) && checker.takes(&plain, text), "{text}: {strict}");
    }
    for text in open {
        assert!(!checker.takes(&strict, text) && checker.takes(&plain, text), "{text}: {strict}");
    }
    let required = checker.strict(&json!({ "type": "object", "required": ["a"] })).unwrap().text;
    assert!(checker.takes(&required, r#"{"a": 1}"#) && !checker.takes(&required, r#"{"a": 1, "b": 1}"#));
    let union = json!({ "anyOf": [{ "type": "object", "properties": { "a": {} } }, { "type": "null" }] });
    let strict = checker.strict(&union).unwrap().text;
    assert!(
        checker.takes(&strict, r#"{"a": 1}"#)
            && !checker.takes(&strict, r#"{"b": 1}"#)
            && checker.takes(&strict, "null")
    );
    let call = checker.tool(&schema, true).unwrap().text;
    let of = |arguments: &str| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    assert!(checker.takes(&call, &of(taken[0])) && !checker.takes(&call, &of(open[0])), "{call}");
}

#[test]
fn unevaluated_properties_are_those_that_no_branch_names() {
    let checker = Checker::new();
    let one = |name: &str| json!({ "type": "object", "properties": { name: { "type": "integer" } } });
    let both = json!({ "allOf": [one("a"), { "$ref": "#/$defs/b" }], "$defs": { "b": one("b") }, "required": ["a"], "unevaluatedProperties": false });
    checker.check(&both, &[r#"{"a": 1, "b": 2}"#, r#"{"a": 1}"#], &[r#"{"a": 1, "c": 1}"#, r#"{"a": 1, "b": "x"}"#]);
    let mut unnamed = both;
    unnamed["required"] = json!(["c"]);
    assert!(checker.plain(&unnamed).is_err(), "a name that is required is not evaluated by that");
}

/// Values that are not served, and their places.
fn unserved() -> Vec<(Value, &'static str, &'static str)> {
    let property = |value: Value| json!({ "type": "object", "properties": { "a": value } });
    vec![
        (property(json!({ "type": "string", "pattern": r"(?<=a)b" })), "/properties/a/pattern", "look-behinds"),
        (property(json!({ "type": "string", "pattern": r"(a)\1" })), "/properties/a/pattern", "backreferences"),
        (property(json!({ "type": "array", "uniqueItems": true })), "/properties/a/uniqueItems", "not served"),
        (property(json!({ "$ref": "https://a.example/b.json" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "$ref": "#/$defs/a" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "$ref": "#here" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "$dynamicRef": "#here" })), "/properties/a/$dynamicRef", "not served"),
        (property(json!({ "dependentRequired": { "b": ["c"] } })), "/properties/a/dependentRequired", "not served"),
        (
            property(json!({ "if": { "type": "object" }, "then": { "required": ["b"] }, "else": { "const": 1 } })),
            "/properties/a/if",
            "not served",
        ),
        (property(json!({ "prefixItems": [true], "unevaluatedItems": false })), "/properties/a/unevaluatedItems", ""),
        (
            property(json!({ "anyOf": [{ "properties": { "b": {} } }], "unevaluatedProperties": false })),
            "/properties/a/unevaluatedProperties",
            "not served",
        ),
        (property(json!({ "items": { "contains": { "const": 1 } } })), "/properties/a/items/contains", "not served"),
        (property(json!({ "not": { "items": { "type": "integer" } } })), "/properties/a/not", "not served"),
        (property(json!({ "oneOf": [{ "format": "date" }, { "format": "time" }] })), "/properties/a", ""),
        (property(json!({ "patternProperties": { "a": { "type": "string" }, "b": {} } })), "/properties/a", ""),
        (property(json!({ "type": "string", "pattern": r"\bcat\b" })), "/properties/a/pattern", r"\b, and ends"),
        (property(json!({ "multipleOf": 999_983 })), "/properties/a/multipleOf", "common multiple"),
        (property(json!({ "const": 9_007_199_254_740_993_i64 })), "/properties/a/const", "2^53"),
        (
            property(json!({ "patternProperties": { "(?<!a)": {} } })),
            "/properties/a/patternProperties/(?<!a)",
            "look-behinds",
        ),
        (property(json!({ "type": "string", "minLength": 3, "maxLength": 2 })), "/properties/a", ""),
    ]
}

#[test]
fn unserved_values_are_refused_with_their_place_and_left_out_of_lenient_tools() {
    let checker = Checker::new();
    for (schema, place, problem) in unserved() {
        if !place.ends_with("/a") {
            for (name, refused) in
                [("the schema", checker.plain(&schema)), ("the parameters of 'f'", checker.tool(&schema, true))]
            {
                let error = refused.unwrap_err().to_string();
                assert!(
                    error.starts_with(&format!("{name} at #{place}: ")) && error.contains(problem),
                    "{schema}: {error}"
                );
            }
        }
        let grammar = checker.tool(&schema, false).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert_eq!(grammar.dropped.is_empty(), place.ends_with("/a"), "{schema}: {:?}", grammar.dropped);
        assert!(grammar.dropped.iter().all(|dropped| dropped.contains(place)), "{:?}", grammar.dropped);
    }
}

#[test]
fn wrong_values_are_refused_with_their_place_and_left_out_of_lenient_tools() {
    let checker = Checker::new();
    let call = |value: &str| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {value}}}\n</tool_call>");
    let check = |schema: &Value, place: &str, taken: &str, refused: &str| {
        for outcome in [checker.plain(schema), checker.strict(schema), checker.tool(schema, true)] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(&format!(" at #{place}: ")), "{schema}: {error}");
        }
        let grammar = checker.tool(schema, false).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert!(checker.takes(&grammar.text, &call(taken)), "{schema}: {taken} of {}", grammar.text);
        assert!(!checker.takes(&grammar.text, &call(refused)), "{schema}: {refused} of {}", grammar.text);
        grammar.dropped
    };
    // A wrong keyword of a property, beside one that holds.
    for (held, keyword, wrong, place, taken, refused) in [
        (json!({}), "type", json!("any"), "/type", "1", "x"),
        (
            json!({ "properties": { "b": { "type": "null" } } }),
            "type",
            json!("dict"),
            "/type",
            "{\"b\": null}",
            "{\"b\": 1}",
        ),
        (json!({}), "type", json!(["string", "any"]), "/type", "1", "x"),
        (json!({}), "type", json!([]), "/type", "1", "x"),
        (json!({}), "type", json!({ "type": "string" }), "/type", "1", "x"),
        (json!({ "type": "string" }), "minLength", json!(-1), "/minLength", "\"\"", "1"),
        (json!({ "type": "string" }), "maxLength", json!("9"), "/maxLength", "\"\"", "1"),
        (json!({ "type": "string" }), "pattern", json!(1), "/pattern", "\"\"", "1"),
        (json!({ "type": "string" }), "format", json!(["date"]), "/format", "\"\"", "1"),
        (json!({ "type": "string" }), "enum", json!([]), "/enum", "\"\"", "1"),
        (json!({ "type": "string" }), "enum", json!("a"), "/enum", "\"\"", "1"),
        (json!({ "type": "string" }), "$ref", json!(1), "/$ref", "\"\"", "1"),
        (json!({ "type": "string" }), "anyOf", json!([]), "/anyOf", "\"\"", "1"),
        (json!({ "type": "string" }), "oneOf", json!({}), "/oneOf", "\"\"", "1"),
        (json!({ "type": "string" }), "allOf", json!([1]), "/allOf/0", "\"\"", "1"),
        (json!({ "type": "string" }), "not", json!("a"), "/not", "\"\"", "1"),
        (json!({ "type": "integer" }), "minimum", json!("1"), "/minimum", "0", "0.5"),
        (json!({ "type": "integer" }), "exclusiveMaximum", json!([]), "/exclusiveMaximum", "0", "0.5"),
        (json!({ "type": "integer" }), "multipleOf", json!(0), "/multipleOf", "0", "0.5"),
        (json!({ "type": "array" }), "items", json!("string"), "/items", "[1]", "1"),
        (json!({ "type": "array" }), "uniqueItems", json!("yes"), "/uniqueItems", "[1]", "1"),
        (json!({ "type": "array" }), "minItems", json!(1.5), "/minItems", "[]", "1"),
        (
            json!({ "type": "array", "items": { "type": "null" } }),
            "prefixItems",
            json!(1),
            "/prefixItems",
            "[null]",
            "[1]",
        ),
        (json!({ "type": "object" }), "properties", json!({ "b": 1 }), "/properties/b", "{\"b\": 1}", "1"),
        (
            json!({ "type": "object", "properties": { "b": { "type": "null" } } }),
            "required",
            json!(true),
            "/required",
            "{}",
            "{\"b\": 1}",
        ),
        (json!({ "type": "object" }), "patternProperties", json!([]), "/patternProperties", "{}", "1"),
        (json!({ "type": "object" }), "propertyNames", json!([]), "/propertyNames", "{}", "1"),
        (json!({ "type": "object" }), "additionalProperties", json!("no"), "/additionalProperties", "{}", "1"),
        (
            json!({ "type": "object", "additionalProperties": false }),
            "properties",
            json!([]),
            "/properties",
            "{}",
            "{\"b\": 1}",
        ),
    ] {
        let mut property = held;
        property[keyword] = wrong;
        let schema = json!({ "type": "object", "properties": { "a": property }, "required": ["a"] });
        let of = |value: &str| format!("{{\"a\": {value}}}");
        let dropped = check(&schema, &format!("/properties/a{place}"), &of(taken), &of(refused));
        assert!(dropped.len() == 1 && dropped[0].contains(&format!(" at #/properties/a{place}: ")), "{dropped:?}");
    }
    let php = json!({ "type": "object", "properties": [], "required": [], "additionalProperties": false });
    assert_eq!(check(&php, "/properties", "{}", "{\"a\": 1}").len(), 1);
    let not_one = json!({ "type": "object", "properties": { "a": 1, "b": { "type": "string" } } });
    assert_eq!(check(&not_one, "/properties/a", "{\"a\": 1, \"b\": \"\"}", "{\"b\": 1}").len(), 1);
    // Null says nothing, and Gemini writes types in upper case: neither is left out.
    for keyword in ["enum", "items", "minLength", "anyOf", "$ref", "not", "nullable", "properties", "pattern", "format"]
    {
        let mut property = json!({ "type": "STRING", "description": null });
        property[keyword] = Value::Null;
        let schema = json!({ "type": "object", "properties": { "a": property, "type": { "type": ["Null"] } }, "required": null });
        let dropped = check(&schema, "/properties/a/type", "{\"a\": \"\", \"type\": null}", "{\"a\": 1}");
        assert_eq!(dropped, [""; 0], "{keyword}");
    }
    let constant = json!({ "type": "object", "properties": { "a": { "const": null, "type": "Null" } } });
    check(&constant, "/properties/a/type", "{\"a\": null}", "{\"a\": 1}");
    // What is too large stays an error.
    let deep = (0..120).fold(json!({}), |inner, _| json!({ "items": inner }));
    let error = checker.tool(&json!({ "type": "object", "properties": { "a": deep } }), false).unwrap_err().to_string();
    assert!(error.ends_with(": the schema is too large"), "{error}");
}

#[test]
fn place_is_found_if_the_library_refuses() {
    let checker = Checker::new();
    for (schema, place) in [
        (
            json!({ "properties": { "a": { "$ref": "#/$defs/A" } }, "required": ["a"], "$defs": { "A": { "allOf": [{ "type": "string" }, { "type": "integer" }] } } }),
            "/$defs/A",
        ),
        (
            json!({ "items": { "type": "string", "minLength": 3, "maxLength": 2 }, "minItems": 1, "type": "array" }),
            "/items",
        ),
        (
            json!({ "properties": { "n": { "type": "integer", "minimum": 3, "maximum": 2 } }, "required": ["n"], "type": "object" }),
            "/properties/n",
        ),
    ] {
        let error = checker.plain(&schema).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the schema at #{place}: ")), "{schema}: {error}");
    }
    let lenient = json!({ "type": "object", "required": ["a"], "properties": { "a": { "type": "integer", "minimum": 3, "maximum": 2 } } });
    checker.tool(&lenient, false).unwrap();
    assert!(checker.tool(&lenient, true).is_err());
}

#[test]
fn unknown_formats_describe_unless_strict() {
    let checker = Checker::new();
    for format in ["color", "phone", "foo", "name-email", "regex", "ipv4network"] {
        let schema = json!({ "type": "string", "format": format });
        checker.check(&schema, &["\"anything\""], &["1"]);
        let error = checker.strict(&schema).unwrap_err().to_string();
        assert_eq!(error, format!("the schema at #/format: unknown format '{format}'"));
    }
    for schema in [
        json!({ "type": "integer", "format": "int64" }),
        json!({ "type": "string", "format": "password" }),
        json!({ "type": "string", "format": "nanoid", "pattern": "^[a-z]$" }),
    ] {
        checker.strict(&schema).unwrap();
    }
    checker.check(&json!({ "format": "uuid4" }), &["\"3f2504e0-4f89-41d3-9a0c-0305e82c3301\"", "1"], &["\"x\""]);
}

/// Schemas that cost as much as can be.
fn hostile() -> Vec<(&'static str, Value)> {
    let list = |n: usize, item: &dyn Fn(usize) -> Value| (0..n).map(item).collect::<Vec<_>>();
    let named =
        |n: usize, value: &dyn Fn(usize) -> Value| (0..n).map(|i| (format!("p{i}"), value(i))).collect::<Map<_, _>>();
    let pattern = |pattern: String| json!({ "type": "string", "pattern": pattern });
    let reference = json!({ "allOf": [{ "$ref": "#/$defs/b" }], "type": "object" });
    vec![
        (
            "closed branches",
            json!({ "properties": named(150, &|_| reference.clone()), "$defs": { "b": { "properties": named(300, &|_| json!({})) } } }),
        ),
        (
            "lists that are apart",
            json!({ "enum": list(3000, &|i| json!(i)), "not": { "enum": list(3000, &|i| json!(i + 6000)) } }),
        ),
        (
            "dependents",
            json!({ "required": list(400, &|i| json!(format!("p{i}"))), "dependentRequired": named(4, &|_| json!(list(1500, &|_| json!("p399")))) }),
        ),
        (
            "dependent schemas",
            json!({ "required": list(400, &|i| json!(format!("p{i}"))), "dependentSchemas": named(1500, &|_| json!({ "required": ["p1"] })) }),
        ),
        (
            "conditions in conditions",
            (0..25).fold(
                json!({ "minLength": 2 }),
                |inner, _| json!({ "if": { "not": { "not": { "not": inner.clone() } } }, "then": false }),
            ),
        ),
        (
            "names that are searched",
            json!({ "properties": named(40, &|_| json!({ "propertyNames": { "pattern": "^(?:.*[ab].{90}){2}c" }, "additionalProperties": false, "properties": { "ab".repeat(600): true } })) }),
        ),
        (
            "lists of names",
            json!({ "properties": named(600, &|_| json!({ "propertyNames": { "$ref": "#/$defs/e" } })), "$defs": { "e": { "enum": list(2000, &|i| json!(format!("n{i}"))) } } }),
        ),
        (
            "classes",
            json!({ "anyOf": list(500, &|i| pattern(format!("^[\\p{{L}}{}]+$", char::from_u32(0x3000 + i as u32).unwrap_or('x')))) }),
        ),
        ("look-aheads", json!({ "anyOf": list(900, &|i| pattern(format!("^(?!.*a.{{4}}{i}$)(?=.*b).{{3,{i}}}$"))) })),
        (
            "large look-aheads",
            json!({ "anyOf": list(40, &|i| pattern(format!("^(?:x|(?=(?:.*a.{{9}}){{2}}{i}$)(?!(?:.*[ab].{{9}}){{2}}$).*)y$"))) }),
        ),
        ("nested look-aheads", pattern(format!("^{}a{}$", "(?:b|(?=.*c)".repeat(30), ")".repeat(30)))),
        ("look-aheads in a row", pattern(format!("^a{}$", "(?:b|(?=.*c)d.)".repeat(200)))),
        (
            "unions",
            json!({ "oneOf": list(400, &|i| json!({ "type": "object", "properties": { "k": { "const": i } }, "required": ["k"] })) }),
        ),
        (
            "unions of unions",
            json!({ "oneOf": list(9, &|_| json!({ "anyOf": list(9, &|_| json!({ "anyOf": list(9, &|_| json!({ "type": "string" })) })) })) }),
        ),
        (
            "unserved in many places",
            json!({ "type": "object", "properties": named(900, &|i| json!({ "type": "string", "minLength": 3, "maxLength": i % 3 })) , "required": list(900, &|i| json!(format!("p{i}"))) }),
        ),
        ("depth", (0..60).fold(json!({}), |inner, _| json!({ "anyOf": [inner, { "type": "null" }] }))),
        (
            "references in a ring",
            json!({ "$ref": "#/$defs/p0", "$defs": named(100, &|i| json!({ "allOf": [{ "$ref": format!("#/$defs/p{}", (i + 1) % 100) }] })) }),
        ),
    ]
}

#[test]
fn hostile_schemas_cost_bounded_time() {
    let checker = Checker::new();
    for (name, schema) in hostile() {
        assert!(schema.to_string().len() < 64 << 10, "{name}: {}", schema.to_string().len());
        for kind in ["plain", "strict", "lenient"] {
            let began = Instant::now();
            let outcome = match kind {
                "plain" => checker.plain(&schema),
                "strict" => checker.strict(&schema),
                _ => checker.tool(&schema, false),
            };
            let took = began.elapsed();
            println!("{took:?}: {name}, {kind}: {:.150?}", outcome.err().map(|error| error.to_string()));
            assert!(took < Duration::from_secs(10), "{name}, {kind}: {took:?}");
        }
    }
}

/// Parts of schemas that are refused, and words of the errors.
type Refused<'a> = &'a [(&'a str, &'a str)];

/// Checks schemas of a library: all are taken, but for these, which are refused with their place.
fn check_library(schemas: &str, plain: Refused<'_>, strict: Refused<'_>) {
    let checker = Checker::new();
    let schemas: Map<String, Value> = serde_json::from_str(schemas).expect("JSON");
    assert!(schemas.len() > 150, "{}", schemas.len());
    let mut wrong = Vec::new();
    for (name, schema) in &schemas {
        let text = schema.to_string();
        let mut outcomes = vec![("plain", checker.plain(schema), plain), ("strict", checker.strict(schema), strict)];
        if schema.get("type").is_none_or(|kind| kind == "object") {
            outcomes.push(("lenient", checker.tool(schema, false), &[]));
        }
        for (kind, outcome, refused) in outcomes {
            let expected = refused.iter().find(|(part, _)| text.contains(part)).map(|(_, words)| *words);
            let error = outcome.err().map(|error| error.to_string());
            let is_right = match (&error, expected) {
                (None, None) => true,
                (Some(error), Some(words)) => error.contains(" at #") && error.contains(words),
                _ => false,
            };
            if !is_right {
                wrong.push(format!("{kind}: {name}: {error:?}: {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), schemas.len(), wrong.join("\n"));
}

#[test]
fn schemas_of_zod_are_held_to_or_refused_with_their_place() {
    let never = ("\"not\":{}", "no value has this form");
    let float = ("3.4028234663852886e+38", "limits beyond 2^63");
    let exclusive = (r#"{"b":{"type":"string"}},"required":["b"]}]"#, "oneOf is taken if");
    check_library(include_str!("fixtures/schemas/zod.json"), &[never, float, exclusive], &[never, float]);
}

#[test]
fn schemas_of_pydantic_are_held_to_or_refused_with_their_place() {
    let formats = ["fraction", "regex", "ipv4network", "ipv6network", "ipv4interface", "ipv6interface", "name-email"];
    let more = ["multi-host-uri", "ipvanyaddress", "ipvanyinterface", "ipvanynetwork", "color", "phone"];
    let formats: Vec<_> = formats.iter().chain(&more).map(|name| format!("\"format\":\"{name}\"")).collect();
    let set = ("\"uniqueItems\":true", "/uniqueItems: this keyword is not served");
    let strict: Vec<_> = formats.iter().map(|format| (format.as_str(), "unknown format")).chain([set]).collect();
    check_library(include_str!("fixtures/schemas/pydantic.json"), &[set], &strict);
}

//! Schemas that clients send are held to, or refused with their place.

use std::sync::Arc;

use baton_grammar::{Answer, Calls, CheckedGrammar, Form, GrammarCompiler, GrammarError, Thoughts, Tool};
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
        answer.checked_grammar(&self.compiler).map(|grammar| grammar.expect("there is a form"))
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
        ("minProperties", json!(1)),
        ("minLength", json!(0)),
        ("minItems", json!(0.0)),
        ("patternProperties", json!({})),
        ("dependentRequired", json!({})),
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
    ] {
        let mut schema = of_strings.clone();
        schema["$defs"] = json!({ "name": { "type": "string", "description": "a name" } });
        schema[keyword] = value.clone();
        let grammar = checker.plain(&schema).unwrap_or_else(|error| panic!("{keyword}: {value}: {error}"));
        assert_eq!(grammar.text, bare, "{keyword}: {value}");
        checker.strict(&schema).unwrap_or_else(|error| panic!("strict: {keyword}: {value}: {error}"));
    }
    checker.check(&json!({ "type": "array", "contains": {}, "minContains": 0 }), &["[]", "[1]"], &["{}"]);
    checker.check(&json!({ "type": "integer", "multipleOf": 1 }), &["7"], &["7.5"]);
    checker.check(&json!({ "type": "array", "uniqueItems": true, "maxItems": 1 }), &["[1]"], &["[1, 2]"]);
    checker.check(&json!({ "type": "string", "nullable": true }), &["null", "\"a\""], &["1"]);
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
    let both = object(json!({ "allOf": [{ "pattern": "^a" }, { "not": { "enum": ["ab"] } }] }));
    checker.check(&both, &[r#"{"a": 1}"#, r#"{"abc": 1}"#], &[r#"{"ab": 1}"#, r#"{"b": 1}"#]);
    let mut with_patterns = object(json!({ "pattern": "^[ab]$" }));
    with_patterns["patternProperties"] = json!({ "^a": { "type": "string" }, "b$": { "type": "null" } });
    with_patterns["properties"] = json!({ "c": true });
    checker.check(
        &with_patterns,
        &[r#"{"a": "x"}"#, r#"{"b": null}"#],
        &[r#"{"a": 1}"#, r#"{"ab": 1}"#, r#"{"c": 1}"#],
    );
    checker.check(&object(json!(false)), &["{}"], &[r#"{"a": 1}"#]);
    let overlapping =
        json!({ "patternProperties": { "a": { "minimum": 2 }, "b": { "type": "integer" } }, "type": "object" });
    checker.check(&overlapping, &[r#"{"a": 2.5}"#, r#"{"b": 1}"#, r#"{"ab": 2}"#], &[r#"{"ab": 2.5}"#, r#"{"ab": 1}"#]);
}

#[test]
fn conditions_hold_for_every_value() {
    let checker = Checker::new();
    let object = |more: Value| {
        let mut schema = json!({ "type": "object", "properties": { "a": { "type": "integer" }, "b": { "type": "integer" } }, "additionalProperties": false });
        let Value::Object(more) = more else { panic!("an object") };
        schema.as_object_mut().expect("an object").extend(more);
        schema
    };
    let (none, a, b, both) = ("{}", r#"{"a": 1}"#, r#"{"b": 1}"#, r#"{"a": 1, "b": 1}"#);
    checker.check(&object(json!({ "dependentRequired": { "a": ["b"] } })), &[none, b, both], &[a]);
    checker.check(&object(json!({ "dependencies": { "a": { "required": ["b"] } } })), &[none, b, both], &[a]);
    checker.check(&object(json!({ "not": { "required": ["a"] } })), &[none, b], &[a, both]);
    checker.check(&object(json!({ "minProperties": 1 })), &[a, b, both], &[none]);
    checker.check(&object(json!({ "maxProperties": 1 })), &[none, a, b], &[both]);
    let when =
        json!({ "if": { "properties": { "a": { "const": 1 } }, "required": ["a"] }, "then": { "required": ["b"] } });
    checker.check(&object(when), &[none, r#"{"a": 2}"#, both], &[a]);
    let one = json!({ "oneOf": [{ "required": ["a"] }, { "required": ["b"] }] });
    checker.check(&object(one), &[a, b], &[none, both]);
    checker.check(
        &json!({ "not": { "enum": ["a", 1, null] } }),
        &["\"b\"", "2", "0.5", "true", "[]"],
        &["\"a\"", "1", "null"],
    );
    checker.check(&json!({ "type": "string", "not": { "pattern": "^a" } }), &["\"b\""], &["\"a\"", "\"ab\""]);
    let kinds = json!({ "oneOf": [{ "$ref": "#/$defs/A" }, { "$ref": "#/$defs/B" }], "discriminator": { "propertyName": "kind" }, "$defs": {
        "A": { "type": "object", "properties": { "kind": { "const": "a" } }, "required": ["kind"] },
        "B": { "type": "object", "properties": { "kind": { "enum": ["b", "c"] } }, "required": ["kind"] } } });
    checker.check(&kinds, &[r#"{"kind": "a"}"#, r#"{"kind": "c"}"#], &[r#"{"kind": "d"}"#]);
}

#[test]
fn references_are_found_by_pointer_anchor_and_identifier() {
    let checker = Checker::new();
    for schema in [
        json!({ "$ref": "#/$defs/a~1b%25", "$defs": { "a/b%": { "type": "integer" } } }),
        json!({ "$ref": "#here", "$defs": { "x": { "$anchor": "here", "type": "integer" } } }),
        json!({ "$dynamicRef": "#here", "$defs": { "x": { "$dynamicAnchor": "here", "type": "integer" } } }),
        json!({ "$id": "https://a.example/x/root.json", "$ref": "item.json#/$defs/n",
            "$defs": { "x": { "$id": "item.json", "$defs": { "n": { "type": "integer" } } } } }),
        json!({ "$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "type": "string", "definitions": { "x": { "type": "integer" } } }),
    ] {
        checker.check(&schema, &["1"], &["\"a\"", "1.5"]);
    }
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

/// Values that are not served, and their places.
fn unserved() -> Vec<(Value, &'static str, &'static str)> {
    let property = |value: Value| json!({ "type": "object", "properties": { "a": value } });
    vec![
        (property(json!({ "type": "string", "pattern": r"(?<=a)b" })), "/properties/a/pattern", "look-behinds"),
        (property(json!({ "type": "string", "pattern": r"(a)\1" })), "/properties/a/pattern", "backreferences"),
        (property(json!({ "type": "array", "uniqueItems": true })), "/properties/a/uniqueItems", "differ"),
        (property(json!({ "$ref": "https://a.example/b.json" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "$ref": "#/$defs/a" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "$ref": "#here" })), "/properties/a/$ref", "there is no"),
        (property(json!({ "items": { "contains": { "const": 1 } } })), "/properties/a/items/contains", "not served"),
        (property(json!({ "not": { "items": { "type": "integer" } } })), "/properties/a/not", "not served"),
        (
            property(json!({ "oneOf": [{ "format": "date" }, { "format": "time" }] })),
            "/properties/a/oneOf",
            "oneOf is taken if",
        ),
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
    // What is no schema is refused of any tool.
    for (schema, place) in [
        (json!({ "type": "object", "properties": { "a": { "type": "colour" } } }), "/properties/a/type"),
        (json!({ "type": "object", "properties": [] }), "/properties"),
        (json!({ "type": "object", "properties": { "a": { "minLength": -1 } } }), "/properties/a/minLength"),
        (json!({ "type": "object", "properties": { "a": { "enum": [] } } }), "/properties/a/enum"),
        (json!({ "type": "object", "properties": { "a": 1 } }), "/properties/a"),
        (json!({ "type": "object", "properties": { "a": { "items": { "anyOf": [] } } } }), "/properties/a/items/anyOf"),
    ] {
        for refused in [checker.plain(&schema), checker.strict(&schema), checker.tool(&schema, false)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&format!(" at #{place}: ")), "{schema}: {error}");
        }
    }
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

/// Schemas of a library: all are taken, but for these, which are refused with their place.
fn check_library(schemas: &str, refused: &[(&str, &str)], refused_strictly: &[(&str, &str)]) {
    let checker = Checker::new();
    let schemas: Map<String, Value> = serde_json::from_str(schemas).expect("JSON");
    assert!(schemas.len() > 150, "{}", schemas.len());
    let mut wrong = Vec::new();
    for (name, schema) in &schemas {
        let text = schema.to_string();
        let mut expect = |kind: &str, outcome: Result<CheckedGrammar, GrammarError>, refused: &[(&str, &str)]| {
            let expected = refused.iter().find(|(part, _)| text.contains(part)).map(|(_, keyword)| *keyword);
            match (outcome, expected) {
                (Ok(_), None) => {}
                (Err(error), Some(keyword))
                    if error.to_string().contains(" at #") && error.to_string().contains(keyword) => {}
                (outcome, _) => wrong.push(format!("{kind}: {name}: {outcome:.300?}: {text}")),
            }
        };
        expect("plain", checker.plain(schema), refused);
        expect("strict", checker.strict(schema), &[refused, refused_strictly].concat());
        if schema.get("type").is_none_or(|kind| kind == "object") {
            expect("lenient tool", checker.tool(schema, false), &[]);
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), schemas.len(), wrong.join("\n"));
}

#[test]
fn schemas_of_zod_are_held_to_or_refused_with_their_place() {
    let refused = [("\"not\":{}", "no value has this form"), ("3.4028234663852886e+38", "limits beyond 2^63")];
    check_library(include_str!("fixtures/schemas/zod.json"), &refused, &[]);
}

#[test]
fn schemas_of_pydantic_are_held_to_or_refused_with_their_place() {
    let formats = ["fraction", "regex", "ipv4network", "ipv6network", "ipv4interface", "ipv6interface", "name-email"];
    let more = ["multi-host-uri", "ipvanyaddress", "ipvanyinterface", "ipvanynetwork", "color", "phone"];
    let formats: Vec<_> = formats.iter().chain(&more).map(|name| format!("\"format\":\"{name}\"")).collect();
    let refused_strictly: Vec<_> = formats.iter().map(|format| (format.as_str(), "unknown format")).collect();
    let refused = [("\"uniqueItems\":true", "uniqueItems")];
    check_library(include_str!("fixtures/schemas/pydantic.json"), &refused, &refused_strictly);
}

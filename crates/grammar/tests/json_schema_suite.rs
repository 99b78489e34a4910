//! The official test suite of JSON Schema: each schema is enforced, true of every value, or refused
//! with its place. No value that a schema refuses can be written.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_grammar::{Answer, Calls, Form, GrammarCompiler, Thoughts};
use baton_text::{OutputFormat, Tokenizer};
use serde_json::{Map, Value};

const DRAFTS: [(&str, &str); 5] = [
    ("draft4", "http://json-schema.org/draft-04/schema#"),
    ("draft6", "http://json-schema.org/draft-06/schema#"),
    ("draft7", "http://json-schema.org/draft-07/schema#"),
    ("draft2019-09", "https://json-schema.org/draft/2019-09/schema"),
    ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
];
/// Most spellings of a value that are tried.
const MAX_SPELLINGS: usize = 48;
/// Longest that a schema may take, compiled without optimisation beside other tests.
const MAX_TIME: Duration = Duration::from_secs(10);

/// What became of a keyword's schemas in a draft.
#[derive(Debug, Default)]
struct Outcome {
    enforced: u32,
    ignored: u32,
    refused: u32,
    /// Schemas that let fewer values be than they say.
    narrower: u32,
    /// What went wrong.
    wrong: Vec<String>,
    /// Why schemas were refused, and which values are not taken.
    remarks: Vec<String>,
}

/// Spellings of a value: properties in each order, whole numbers with and without a fraction.
fn spellings(value: &Value) -> Vec<String> {
    let mut all = match value {
        Value::Array(values) => {
            let items: Vec<_> = values.iter().map(spellings).collect();
            products(&items).into_iter().map(|items| format!("[{}]", items.join(", "))).collect()
        }
        Value::Object(fields) => {
            let mut all = Vec::new();
            for order in orders(fields.len()) {
                let fields: Vec<_> = fields.iter().collect();
                let items: Vec<_> = order
                    .iter()
                    .map(|&index| {
                        let (name, value) = fields[index];
                        let name = Value::from(name.as_str());
                        spellings(value).into_iter().map(|value| format!("{name}: {value}")).collect()
                    })
                    .collect();
                all.extend(products(&items).into_iter().map(|items| format!("{{{}}}", items.join(", "))));
            }
            all
        }
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() == 0.0 && float.abs() < 1e15 => {
                vec![format!("{float}"), format!("{float:.1}")]
            }
            _ => vec![number.to_string()],
        },
        other => vec![other.to_string()],
    };
    all.truncate(MAX_SPELLINGS);
    all
}

fn products(items: &[Vec<String>]) -> Vec<Vec<String>> {
    items.iter().fold(vec![Vec::new()], |before, item| {
        let longer =
            before.iter().flat_map(|list| item.iter().map(move |one| [list.as_slice(), &[one.clone()]].concat()));
        longer.take(MAX_SPELLINGS).collect()
    })
}

fn orders(n: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for index in 0..n {
        let longer = all.iter().flat_map(|order: &Vec<usize>| {
            (0..=order.len()).rev().map(move |at| {
                let mut longer = order.clone();
                longer.insert(at, index);
                longer
            })
        });
        all = longer.take(MAX_SPELLINGS).collect();
    }
    all
}

struct Compiled<'c> {
    compiler: &'c GrammarCompiler,
    grammar: Arc<str>,
}

impl Compiled<'_> {
    fn takes(&self, value: &Value) -> bool {
        spellings(value).iter().any(|text| {
            let mut matcher = self.compiler.compile(&self.grammar).expect("it compiled before");
            let tokens: Vec<_> = text.bytes().map(u32::from).collect();
            matcher.take(&tokens).is_ok() && matcher.mask().is_ok_and(|mask| mask.allows(257))
        })
    }
}

fn group_outcome(group: &Value, uri: &str, compiler: &GrammarCompiler, outcome: &mut Outcome) {
    let name = group["description"].as_str().unwrap_or_default();
    let mut schema = group["schema"].clone();
    if let Value::Object(fields) = &mut schema {
        if !fields.contains_key("$schema") {
            let mut with: Map<String, Value> = Map::from_iter([("$schema".to_owned(), Value::from(uri))]);
            with.append(fields);
            *fields = with;
        }
    }
    let tokenizer = Tokenizer::bytes();
    let format = OutputFormat::default();
    let form = Some(Form::JsonSchema(schema.to_string()));
    let calls = Calls::None;
    let answer =
        Answer { format: &format, tokenizer: &tokenizer, thoughts: Thoughts::Over, form, calls, one_call: false };
    let began = Instant::now();
    let grammar = answer.checked_grammar(compiler);
    let took = began.elapsed();
    if took > MAX_TIME {
        outcome.wrong.push(format!("{name}: it took {took:?}"));
    }
    let grammar = match grammar {
        Ok(grammar) => grammar.expect("a schema has a grammar").text,
        Err(error) => {
            outcome.refused += 1;
            let error = error.to_string();
            let has_place = error.starts_with("the schema at #") || schema == Value::Bool(false);
            if has_place { &mut outcome.remarks } else { &mut outcome.wrong }.push(format!("{name}: {error}"));
            return;
        }
    };
    let compiled = Compiled { compiler, grammar };
    let mut has_invalid = false;
    let mut is_narrower = false;
    let mut is_wrong = false;
    for test in group["tests"].as_array().into_iter().flatten() {
        let is_valid = test["valid"] == true;
        has_invalid |= !is_valid;
        let takes = compiled.takes(&test["data"]);
        let what = format!("{name}: {}: {}", test["description"].as_str().unwrap_or_default(), test["data"]);
        if takes && !is_valid {
            is_wrong = true;
            outcome.wrong.push(what);
        } else if !takes && is_valid {
            is_narrower = true;
            outcome.remarks.push(format!("narrower: {what}"));
        }
    }
    match (is_wrong, is_narrower, has_invalid) {
        (true, ..) => {}
        (_, true, _) => outcome.narrower += 1,
        (.., true) => outcome.enforced += 1,
        _ => outcome.ignored += 1,
    }
}

fn draft_outcomes(folder: &Path, uri: &str) -> BTreeMap<String, Outcome> {
    let compiler = GrammarCompiler::new(&Tokenizer::bytes()).expect("bytes are a vocabulary");
    let mut outcomes = BTreeMap::new();
    for file in fs::read_dir(folder).expect("a folder of the suite") {
        let path = file.expect("a file").path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let keyword = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let groups: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        let outcome: &mut Outcome = outcomes.entry(keyword).or_default();
        for group in groups.as_array().expect("a list") {
            group_outcome(group, uri, &compiler, outcome);
        }
    }
    outcomes
}

fn table(drafts: &[(&str, BTreeMap<String, Outcome>)]) -> String {
    let mut text = include_str!("fixtures/json-schema-head.md").to_owned();
    for (draft, outcomes) in drafts {
        let _ = writeln!(
            text,
            "\n## {draft}\n\n| keyword | enforced | true of every value | narrower | refused |\n|---|---|---|---|---|"
        );
        for (keyword, outcome) in outcomes {
            let Outcome { enforced, ignored, refused, narrower, .. } = outcome;
            let _ = writeln!(text, "| `{keyword}` | {enforced} | {ignored} | {narrower} | {refused} |");
        }
    }
    text
}

/// The page is made by the test with `BATON_UPDATE=1`.
#[test]
#[ignore = "needs the JSON Schema test suite: scripts/json-schema-suite.sh"]
fn json_schema_suite_accepts_no_wrong_value_and_refuses_with_a_place() {
    let folder =
        std::env::var("BATON_JSON_SCHEMA_SUITE").expect("BATON_JSON_SCHEMA_SUITE: a folder with the suite's drafts");
    let folder = PathBuf::from(folder);
    let drafts = std::thread::scope(|scope| {
        let threads = DRAFTS.map(|(draft, uri)| {
            let folder = folder.join(draft);
            (draft, scope.spawn(move || draft_outcomes(&folder, uri)))
        });
        threads.map(|(draft, thread)| (draft, thread.join().expect("no panic")))
    });
    let mut wrong = Vec::new();
    for (draft, outcomes) in &drafts {
        for (keyword, outcome) in outcomes {
            outcome.remarks.iter().for_each(|remark| println!("{draft} {keyword}: {remark}"));
            wrong.extend(outcome.wrong.iter().map(|what| format!("{draft} {keyword}: {what}")));
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json-schema.md");
    let text = table(&drafts);
    if std::env::var_os("BATON_UPDATE").is_some() {
        fs::write(&path, &text).expect("docs/json-schema.md can be written");
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(
        fs::read_to_string(&path).is_ok_and(|page| page == text),
        "docs/json-schema.md: run it with BATON_UPDATE=1"
    );
}

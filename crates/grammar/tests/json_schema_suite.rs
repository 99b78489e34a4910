//! The official test suite of JSON Schema: each schema is enforced, true of every value, or refused
//! with its place. No value that a schema refuses can be written.

// Tests read the clock.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_grammar::{Answer, Calls, Effort, Form, GrammarCompiler, Thoughts};
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

/// Outcomes of a file's schemas.
#[derive(Debug, Default)]
struct Outcome {
    enforced: u32,
    ignored: u32,
    refused: u32,
    /// Schemas of which the grammar refuses some valid values.
    narrower: u32,
    /// Schemas of which the grammar takes some values that are not valid.
    wider: u32,
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
        let longer = before
            .iter()
            .flat_map(|list| item.iter().map(move |one| [list.as_slice(), std::slice::from_ref(one)].concat()));
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

/// A schema with the version of its folder.
fn versioned(schema: &Value, uri: &str) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let mut versioned = Map::from_iter([("$schema".to_owned(), Value::from(uri))]);
    versioned.extend(fields.clone());
    Value::Object(versioned)
}

fn checked(form: Form, compiler: &GrammarCompiler) -> Result<Arc<str>, String> {
    let tokenizer = Tokenizer::bytes();
    let format = OutputFormat::default();
    let thoughts = Thoughts::Over;
    let form = Some(form);
    let calls = Calls::None;
    let answer = Answer { format: &format, tokenizer: &tokenizer, thoughts, form, calls, one_call: false };
    let grammar = answer.checked_grammar(compiler, Effort::Full).map_err(|error| error.to_string())?;
    Ok(grammar.expect("a schema has a grammar").text)
}

fn group_outcome(group: &Value, form: Form, compiler: &GrammarCompiler, outcome: &mut Outcome) {
    let name = group["description"].as_str().unwrap_or_default();
    let began = Instant::now();
    let grammar = checked(form, compiler);
    let took = began.elapsed();
    if took > MAX_TIME {
        outcome.wrong.push(format!("{name}: it took {took:?}"));
    }
    let grammar = match grammar {
        Ok(grammar) => grammar,
        Err(error) => {
            outcome.refused += 1;
            let has_place = error.starts_with("the schema at #");
            if has_place { &mut outcome.remarks } else { &mut outcome.wrong }.push(format!("{name}: {error}"));
            return;
        }
    };
    let compiled = Compiled { compiler, grammar };
    let mut has_invalid = false;
    let mut is_narrower = false;
    let mut wrong = Vec::new();
    for test in group["tests"].as_array().into_iter().flatten() {
        let is_valid = test["valid"] == true;
        has_invalid |= !is_valid;
        let takes = compiled.takes(&test["data"]);
        let what = format!("{name}: {}: {}", test["description"].as_str().unwrap_or_default(), test["data"]);
        if takes && !is_valid {
            wrong.push(what);
        } else if !takes && is_valid {
            is_narrower = true;
            outcome.remarks.push(format!("narrower: {what}"));
        }
    }
    match (wrong.is_empty(), is_narrower, has_invalid) {
        (false, ..) => outcome.wider += 1,
        (_, true, _) => outcome.narrower += 1,
        (.., true) => outcome.enforced += 1,
        _ => outcome.ignored += 1,
    }
    outcome.wrong.append(&mut wrong);
}

/// Outcomes of the schemas of a folder, by file.
fn folder_outcomes(folder: &Path, uri: &str, form: fn(String) -> Form) -> BTreeMap<String, Outcome> {
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
            group_outcome(group, form(versioned(&group["schema"], uri).to_string()), &compiler, outcome);
        }
    }
    outcomes
}

/// Lines of the page: a table of outcomes, by file.
fn table(title: &str, outcomes: &BTreeMap<String, Outcome>, has_wider: bool) -> String {
    let (head, line) = if has_wider { (" wider |", "---|") } else { ("", "") };
    let mut text = format!(
        "\n## {title}\n\n| keyword | enforced | true of every value | narrower | refused |{head}\n|---|---|---|---|---|{line}\n"
    );
    for (keyword, outcome) in outcomes {
        let Outcome { enforced, ignored, refused, narrower, wider, .. } = outcome;
        let _ = write!(text, "| `{keyword}` | {enforced} | {ignored} | {narrower} | {refused} |");
        let _ = if has_wider { writeln!(text, " {wider} |") } else { writeln!(text) };
    }
    text
}

/// Values that are taken wrongly, and refusals without a place. Prints what else is to be said.
fn wrong<'o>(folders: impl IntoIterator<Item = &'o Folder>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (folder, outcomes) in folders {
        for (keyword, outcome) in outcomes {
            outcome.remarks.iter().for_each(|remark| println!("{folder} {keyword}: {remark}"));
            wrong.extend(outcome.wrong.iter().map(|what| format!("{folder} {keyword}: {what}")));
        }
    }
    wrong
}

/// A folder's name, and its outcomes by file.
type Folder = (String, BTreeMap<String, Outcome>);

/// Outcomes of a folder of some drafts.
fn outcomes(drafts: &[(&str, &str)], folder: &str, form: fn(String) -> Form) -> Vec<Folder> {
    let suite =
        std::env::var("BATON_JSON_SCHEMA_SUITE").expect("BATON_JSON_SCHEMA_SUITE: a folder with the suite's drafts");
    let suite = PathBuf::from(suite);
    std::thread::scope(|scope| {
        let threads: Vec<_> = drafts
            .iter()
            .map(|(draft, uri)| {
                let path = suite.join(draft).join(folder);
                let name = if folder.is_empty() { (*draft).to_owned() } else { format!("{draft}, {folder}") };
                (name, scope.spawn(move || folder_outcomes(&path, uri, form)))
            })
            .collect();
        threads.into_iter().map(|(name, thread)| (name, thread.join().expect("no panic"))).collect()
    })
}

/// The page is made by the test with `BATON_UPDATE=1`. Of what the suite calls optional, some
/// values are taken wrongly: the page counts them.
#[test]
#[ignore = "needs the JSON Schema test suite: scripts/json-schema-suite.sh"]
fn json_schema_suite_accepts_no_wrong_value_and_refuses_with_a_place() {
    let required = outcomes(&DRAFTS, "", Form::JsonSchema);
    let mut optional = outcomes(&DRAFTS, "optional", Form::JsonSchema);
    // Formats are held to, or refused, in strict schemas.
    optional.extend(outcomes(&DRAFTS[4..], "optional/format", Form::StrictJsonSchema));
    let mut text = include_str!("fixtures/json-schema-head.md").to_owned();
    required.iter().for_each(|(name, outcomes)| text.push_str(&table(name, outcomes, false)));
    optional.iter().for_each(|(name, outcomes)| text.push_str(&table(name, outcomes, true)));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json-schema.md");
    if std::env::var_os("BATON_UPDATE").is_some() {
        fs::write(&path, &text).expect("docs/json-schema.md can be written");
    }
    println!("taken wrongly, optional:\n{}", wrong(&optional).join("\n"));
    let wrong = wrong(&required);
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(
        fs::read_to_string(&path).is_ok_and(|page| page == text),
        "docs/json-schema.md: run it with BATON_UPDATE=1"
    );
}

/// Closed objects refuse values that the suite calls valid, so there is no table.
#[test]
#[ignore = "needs the JSON Schema test suite: scripts/json-schema-suite.sh"]
fn json_schema_suite_accepts_no_wrong_value_of_strict_schemas() {
    let wrong = wrong(&outcomes(&DRAFTS, "", Form::StrictJsonSchema));
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

//! What a check may cost, and what is remembered of it.

// Tests read the clock.
#![allow(clippy::disallowed_methods)]

use std::time::Instant;

use baton_grammar::{Answer, Calls, Effort, Form, GrammarCompiler, GrammarError, Thoughts};
use baton_text::{OutputFormat, Tokenizer};
use serde_json::{Map, Value, json};

#[test]
fn schemas_that_cost_much_are_not_tried_with_a_small_effort_and_verdicts_are_remembered() {
    let tokenizer = Tokenizer::bytes();
    let compiler = GrammarCompiler::new(&tokenizer).expect("bytes are a vocabulary");
    let format = OutputFormat::default();
    let answer = |schema: &Value| Answer {
        format: &format,
        tokenizer: &tokenizer,
        thoughts: Thoughts::Over,
        form: Some(Form::JsonSchema(schema.to_string())),
        calls: Calls::None,
        one_call: false,
    };
    let check = |schema: &Value, effort| answer(schema).checked_grammar(&compiler, effort);
    let wide = |names: usize| {
        let properties: Map<_, _> = (0..names).map(|n| (format!("p{n}"), json!({ "type": "string" }))).collect();
        json!({ "type": "object", "properties": properties })
    };
    let small = wide(5);
    assert_eq!(check(&small, Effort::Known), Err(GrammarError::Costly));
    let grammar = check(&small, Effort::Small).unwrap();
    assert!(grammar.is_some());
    assert_eq!(check(&small, Effort::Known), Ok(grammar));
    // What is wrong at a glance is refused at once; what costs much is not, nor is what is long.
    let wrong = json!({ "type": "colour" });
    let refused = check(&wrong, Effort::Small);
    assert!(matches!(refused, Err(GrammarError::Invalid(_))));
    assert_eq!(check(&wrong, Effort::Known), refused);
    let multiples: Map<_, _> =
        (0..40).map(|n| (format!("p{n}"), json!({ "type": "integer", "multipleOf": 9973, "minimum": n }))).collect();
    for costly in [wide(2000), json!({ "properties": multiples }), wide(400)] {
        assert_eq!(check(&costly, Effort::Small), Err(GrammarError::Costly));
        assert_eq!(check(&costly, Effort::Known), Err(GrammarError::Costly), "that is no verdict");
    }
    let began = Instant::now();
    let refused = check(&wide(2000), Effort::Full);
    let once = began.elapsed();
    assert!(matches!(refused, Err(GrammarError::Invalid(_))), "{refused:?}");
    let began = Instant::now();
    for _ in 0..10 {
        assert_eq!(check(&wide(2000), Effort::Full), refused);
    }
    let again = began.elapsed();
    assert!(again < once, "{again:?} for ten, {once:?} for one");
    assert_ne!(check(&wide(2001), Effort::Known), refused, "of another schema nothing is known");
}

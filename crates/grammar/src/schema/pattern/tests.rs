//! Patterns mean what a search by trial finds.

use proptest::prelude::*;

use super::*;

fn translated(pattern: &str) -> Result<String, String> {
    written(&parse(pattern)?)
}

/// Where an expression may end, from a place in a text on, by trial.
fn ends(node: &Node, text: &[char], at: usize) -> Vec<usize> {
    let is_word = |at: usize| text.get(at).is_some_and(|c| c.is_ascii_alphanumeric() || *c == '_');
    let here = |is: bool| if is { vec![at] } else { Vec::new() };
    let mut found = match node {
        Node::Class(class) => match text.get(at) {
            Some(c) if class.ranges().iter().any(|range| (range.start()..=range.end()).contains(c)) => vec![at + 1],
            _ => Vec::new(),
        },
        Node::Concat(nodes) => {
            nodes.iter().fold(vec![at], |places, node| places.into_iter().flat_map(|at| ends(node, text, at)).collect())
        }
        Node::Either(nodes) => nodes.iter().flat_map(|node| ends(node, text, at)).collect(),
        Node::Repeat { node, min, max } => {
            let mut all = if *min == 0 { vec![at] } else { Vec::new() };
            let mut places = vec![at];
            for times in 1..=max.unwrap_or(u32::MAX).min(*min + text.len() as u32 + 1) {
                places = places.into_iter().flat_map(|at| ends(node, text, at)).collect();
                places.sort_unstable();
                places.dedup();
                if times >= *min {
                    all.extend(&places);
                }
            }
            all
        }
        Node::Start => here(at == 0),
        Node::End => here(at == text.len()),
        Node::WordBoundary { is } => here((is_word(at) != (at > 0 && is_word(at - 1))) == *is),
        Node::Ahead { is, node } => here(ends(node, text, at).is_empty() != *is),
    };
    found.sort_unstable();
    found.dedup();
    found
}

fn found_by_trial(node: &Node, text: &str) -> bool {
    let text: Vec<_> = text.chars().collect();
    (0..=text.len()).any(|at| !ends(node, &text, at).is_empty())
}

/// Whether what is written for the library has a text, as the library reads it.
fn written_has(pattern: &str, text: &str) -> bool {
    let mut builder = derivre_search(pattern);
    builder.is_match(text)
}

fn derivre_search(pattern: &str) -> llguidance::derivre::Regex {
    let mut builder = llguidance::derivre::RegexBuilder::new();
    let node = builder.mk(&llguidance::derivre::RegexAst::SearchRegex(pattern.to_owned())).unwrap();
    builder.to_regex_limited(node, 100_000).unwrap()
}

#[test]
fn look_aheads_and_word_boundaries_keep_their_meaning() {
    let cases: [(&str, &[&str], &[&str]); 10] = [
        // pydantic's Decimal.
        (
            r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
            &["1", "-1.5", "+0.5", ".5", "5.", "007"],
            &["", "+", "-.", ".", "1e5", "a"],
        ),
        (r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,5}$", &["a1b", "1a111"], &["abc", "111", "a1", "a1b2c3"]),
        (r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$", &["a.b@c"], &[".a@c", "a..b@c", "a@"]),
        (r"\bcat\b", &["cat", "a cat sat", "cat!"], &["cats", "concat", "ca t"]),
        (r"^(?:(?!ab).)*$", &["", "ba", "a"], &["ab", "xaby"]),
        (r"^a(?!b)[a-z]c$", &["aac", "acc"], &["abc"]),
        (r"^(?!(?:foo|bar)$).*$", &["foobar", "fo", ""], &["foo", "bar"]),
        (r"(^a|b$)c?", &["a", "xb", "ax"], &["xa", "bx", ""]),
        (r"^\S+\b$", &["a", "é!a"], &["a!", "a b"]),
        (r"^(?i)abc\u{e9}\/[^\]a-]$", &["ABCÉ/x", "abcé/B"], &["abcé/a", "abcé/-", "abc/x"]),
    ];
    for (pattern, taken, refused) in cases {
        let written = translated(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
        for text in taken {
            assert!(written_has(&written, text), "{pattern}: {text:?} in {written}");
        }
        for text in refused {
            assert!(!written_has(&written, text), "{pattern}: {text:?} in {written}");
        }
    }
}

#[test]
fn wrong_and_irregular_patterns_are_named() {
    for (pattern, problem) in [
        ("(", "unclosed group"),
        ("a)", "unopened group"),
        ("[a", "unclosed character class"),
        ("*a", "'*' repeats nothing"),
        ("[z-a]", "the start must be <= the end"),
        ("a{3,2}", "out of order"),
        (r"(a)\1", "backreferences"),
        (r"(?<n>a)\k<n>", "backreferences"),
        (r"(?<=a)b", "look-behinds"),
        (r"(?<!a)b", "look-behinds"),
        (r"\q", "unknown escape"),
        (r"\p{Nothing}", "unknown property"),
        ("(?=a{500})a{500}", "too complex"),
    ] {
        let error = translated(pattern).unwrap_err();
        assert!(error.contains(problem), "{pattern}: {error}");
    }
    assert!(translated(&"(".repeat(10_000)).is_err());
}

fn pattern() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("a".to_owned()),
        Just("b".to_owned()),
        Just("[^a]".to_owned()),
        Just("-".to_owned()),
        Just(r"\w".to_owned()),
        Just(".".to_owned()),
        Just("^".to_owned()),
        Just("$".to_owned()),
        Just(r"\b".to_owned()),
        Just(r"\B".to_owned()),
    ];
    leaf.prop_recursive(4, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat()),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("(?:{a}|{b})")),
            inner.clone().prop_map(|a| format!("(?={a})")),
            inner.clone().prop_map(|a| format!("(?!{a})")),
            inner.clone().prop_map(|a| format!("(?:{a})*")),
            inner.clone().prop_map(|a| format!("(?:{a}){{1,2}}")),
            inner.prop_map(|a| format!("(?:{a})?")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn automaton_finds_what_trial_finds(pattern in pattern(), texts in prop::collection::vec("[ab é-]{0,5}", 8)) {
        let node = parse(&pattern).unwrap();
        // What repeats nothing but a look is refused.
        let (Ok(automaton), Ok(written)) = (Automaton::new(&node), translated(&pattern)) else { return Ok(()) };
        let smallest = automaton.minimized();
        for text in &texts {
            let expected = found_by_trial(&node, text);
            prop_assert_eq!(automaton.accepts(text), expected, "{} in {:?}", pattern, text);
            prop_assert_eq!(smallest.accepts(text), expected, "{} in {:?}, smallest", pattern, text);
            prop_assert_eq!(written_has(&written, text), expected, "{} in {:?} as {}", pattern, text, written);
        }
    }
}

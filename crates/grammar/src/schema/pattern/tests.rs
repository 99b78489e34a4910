//! Patterns mean what an engine that looks ahead finds.

use llguidance::derivre::Regex;
use proptest::prelude::*;

use super::*;

/// What is written for the library, as the library reads it.
fn compiled(pattern: &str) -> Result<Vec<Regex>, String> {
    let patterns = written(pattern, &mut Work::default())?;
    let compiled = patterns.iter().map(|pattern| {
        let mut work = Work::default();
        let expression = work.expression(pattern)?;
        work.expressions.to_regex_limited(expression, 100_000).map_err(|error| error.to_string())
    });
    compiled.collect()
}

fn finds(regexes: &mut [Regex], text: &str) -> bool {
    regexes.iter_mut().all(|regex| regex.is_match(text))
}

#[test]
fn look_aheads_keep_their_meaning() {
    let cases: [(&str, &[&str], &[&str]); 10] = [
        // A decimal number of pydantic's, and one with few digits.
        (
            r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
            &["1", "-1.5", "+0.5", ".5", "5.", "007"],
            &["", "+", "-.", ".", "1e5", "a"],
        ),
        (
            r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*)$",
            &["1234", "-1234.56", "0001.5000", ".25"],
            &["12345", "1.234", "", "-", "123456.7"],
        ),
        (r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,5}$", &["a1b", "1a111"], &["abc", "111", "a1", "a1b2c3"]),
        // An address and a duration of Zod's.
        (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            &["a.b@c.de", "x@y-z.a.io"],
            &[".a@c.de", "a..b@c.de", "a@", "a@b", "a.@b.cd"],
        ),
        (
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            &["P1W", "P3Y6M", "PT5M", "P1DT12H", "PT0.5S", "P10Y"],
            &["P", "PT", "P1", "P1WT5M", "P1YW", "1D", "P1DT"],
        ),
        (r"^(?=.{1,5}\.?$)[a-z]+(?:\.[a-z]+)*\.?$", &["a.b", "abcde", "abcde."], &["abcdef", ".a", "a..b"]),
        (r"^a(?!b)[a-z]c$", &["aac", "acc"], &["abc"]),
        (r"^(?!(?:foo|bar)$).*$", &["foobar", "fo", ""], &["foo", "bar"]),
        (r"(?=é)[^a]a?z", &["éz", "xéaz"], &["ez", "éaaz", "z"]),
        (r"^(?:x(?=y)|z).", &["xy", "z1"], &["ax", "z", "xz"]),
    ];
    for (pattern, taken, refused) in cases {
        let mut regexes = compiled(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
        for text in taken {
            assert!(finds(&mut regexes, text), "{pattern}: {text:?}");
        }
        for text in refused {
            assert!(!finds(&mut regexes, text), "{pattern}: {text:?}");
        }
    }
}

#[test]
fn look_ahead_that_says_nothing_is_left_out() {
    // Decimal numbers of few digits, as pydantic has them.
    for (digits, places) in [(5, 2), (10, 2), (20, 8), (38, 9)] {
        let whole = digits - places;
        let most = digits + 1;
        let number = format!(r"\d{{0,{whole}}}\.\d{{0,{places}}}0*");
        let pattern = format!(r"^[+-]?0*(?:\d{{0,{whole}}}|(?=[\d.]{{1,{most}}}0*$){number})$");
        let expected = format!(r"^[+-]?0*(?:\d{{0,{whole}}}$|{number}$)");
        assert_eq!(written(&pattern, &mut Work::default()), Ok(vec![expected]));
    }
}

#[test]
fn patterns_that_are_wrong_or_not_served_are_named() {
    for (pattern, problem) in [
        ("(?=a", "unclosed group"),
        ("(?=a))", "unopened group"),
        ("(?=a)[a", "unclosed character class"),
        ("(?=a)*b", "repeated"),
        ("(?:(?!ab).)*", "repeated"),
        ("(?=a)?b", "optional"),
        (r"(?=a)(b)\1", "backreferences"),
        (r"(?<=a)b", "look-behinds"),
        (r"(?<!a)b", "look-behinds"),
        (r"\bcat\b", r"\b, and ends"),
        ("a$b", r"ends of the text in mid-regex"),
        (r"\b(?=a)", r"\b, and ends"),
        (r"a$(?=b)", "in mid-regex"),
        (r"a(?=^b)", "in mid-regex"),
        (r"(?=a\b)a", r"\b beside"),
        ("(?i)(?=a)", "flags"),
        ("^a(?=(?:b|cc){300}d$)[b-d]*", "too complex"),
        ("(?!.*a.{40}$)b", "too complex"),
        // The library panics here.
        ("(?:(?=-)|-)", "that find the same"),
    ] {
        let error = compiled(pattern).map(|_| ()).unwrap_err();
        assert!(error.contains(problem), "{pattern}: {error}");
    }
    assert!(compiled(&"(?=".repeat(1000)).is_err());
    let mut work = Work { states: MAX_STATES + 1, ..Work::default() };
    assert!(written("a(?=b)", &mut work).is_err(), "no more may be made");
}

fn pattern() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec!["a", "b", "[^a]", "-", "[ab]", ".", "^", "$", "é"]);
    leaf.prop_map(str::to_owned).prop_recursive(4, 12, 3, |inner| {
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
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn written_pattern_finds_what_another_engine_finds(
        pattern in pattern(),
        texts in prop::collection::vec("[ab é-]{0,5}", 8),
    ) {
        // What is not served is refused.
        let (Ok(mut regexes), Ok(model)) = (compiled(&pattern), fancy_regex::Regex::new(&pattern)) else { return Ok(()) };
        for text in &texts {
            let expected = model.is_match(text).unwrap();
            prop_assert_eq!(finds(&mut regexes, text), expected, "{} in {:?}", pattern, text);
        }
    }
}

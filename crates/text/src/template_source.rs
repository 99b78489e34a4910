//! Template sources as the template engine takes them: what Jinja2 has and the engine has not is
//! written in other words. Lines keep their numbers.

use std::borrow::Cow;
use std::iter;

/// Filter that stands for the operator `%`, which formats texts in Python.
pub(crate) const MODULO: &str = "__modulo";
/// Filter that stands for the operator `+`, which escapes texts that stand beside safe ones.
pub(crate) const PLUS: &str = "__plus";
/// Filter of what a loop goes through.
pub(crate) const ITEMS: &str = "__items";
/// Filter of what a variable gets.
pub(crate) const STORED: &str = "__stored";
/// Most filters in one tag: each may put a list into another.
pub(crate) const MAX_FILTERS: usize = 1024;
/// End of the other name that a macro gets.
pub(crate) const NAMED: &str = "__named";
/// Function that makes a macro take any arguments.
pub(crate) const VARIADIC: &str = "__variadic";

/// A filter or a test that a template names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named<'s> {
    pub(crate) is_test: bool,
    pub(crate) name: &'s str,
    /// From 1.
    pub(crate) line: usize,
}

/// The source with the ends of lines that Jinja2 reads: all of them are `\n`.
pub(crate) fn with_plain_newlines(source: &str) -> Cow<'_, str> {
    if source.contains('\r') {
        return Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"));
    }
    Cow::Borrowed(source)
}

/// The source in the engine's words: `%` is a filter, `{% generation %}` is `{% with %}`, and
/// macros that use `varargs` or `kwargs` take them.
pub(crate) fn rewritten(source: &str) -> String {
    let mut edits = Vec::new();
    let tags = tags(source);
    let has_safe = named(source).iter().any(|named| ["safe", "e", "escape", "forceescape"].contains(&named.name));
    for tag in &tags {
        generation(source, tag, &mut edits);
        operators(source, tag, has_safe, &mut edits);
        tuple(source, tag, &mut edits);
        raw(source, tag, &mut edits);
        stored(source, tag, &mut edits);
    }
    variadic(source, &tags, &mut edits);
    applied(source, edits)
}

/// Filters and tests that the source names.
pub(crate) fn named(source: &str) -> Vec<Named<'_>> {
    let mut found = Vec::new();
    let mut line = 1;
    let mut at = 0;
    for tag in tags(source) {
        let tokens = &tag.tokens;
        for (index, token) in tokens.iter().enumerate() {
            let is_test = token.is(source, "is");
            if !is_test && !token.is(source, "|") {
                continue;
            }
            let next = tokens.get(index + 1).filter(|next| !(is_test && next.is(source, "not")));
            let Some(name) = next.or_else(|| tokens.get(index + 2)) else { continue };
            line += source[at..token.start].matches('\n').count();
            at = token.start;
            if name.kind == Kind::Name {
                found.push(Named { is_test, name: name.text(source), line });
            }
        }
    }
    found
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    /// A number or a text.
    Literal,
    Open,
    Close,
    Operator,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    kind: Kind,
    start: usize,
    end: usize,
    /// The token that closes this bracket; any other is its own.
    close: usize,
}

impl Token {
    fn text<'s>(&self, source: &'s str) -> &'s str {
        &source[self.start..self.end]
    }

    fn is(&self, source: &str, text: &str) -> bool {
        self.kind != Kind::Literal && self.text(source) == text
    }
}

/// What is between `{{` and `}}`, or `{%` and `%}`.
struct Tag {
    is_block: bool,
    tokens: Vec<Token>,
    /// How it ends: `%}`, `-%}`.
    closer: std::ops::Range<usize>,
}

impl Tag {
    /// The name of a block's tag; empty for an expression.
    fn name<'s>(&self, source: &'s str) -> &'s str {
        match self.tokens.first() {
            Some(token) if self.is_block => token.text(source),
            _ => "",
        }
    }
}

/// The tags of a source, without those in `{% raw %}`. What is not closed is left out: the engine
/// says so.
fn tags(source: &str) -> Vec<Tag> {
    let mut tags = Vec::new();
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        at += found;
        let opened = &source[at..];
        if let Some(comment) = opened.strip_prefix("{#") {
            let Some(end) = comment.find("#}") else { break };
            at += 2 + end + 2;
            continue;
        }
        let is_block = opened.starts_with("{%");
        if !is_block && !opened.starts_with("{{") {
            at += 1;
            continue;
        }
        let Some(tag) = tag(source, at + 2, is_block) else { break };
        at = tag.closer.end;
        if tag.name(source) == "raw" {
            let Some(end) = end_of_raw(source, at) else { break };
            at = end;
        }
        tags.push(tag);
    }
    tags
}

/// Where `{% endraw %}` begins.
fn end_of_raw(source: &str, from: usize) -> Option<usize> {
    let is_end = |&(at, _): &(usize, &str)| {
        let inside = source[from + at + 2..].trim_start_matches(['-', '+']).trim_start();
        inside.starts_with("endraw")
    };
    source[from..].match_indices("{%").find(is_end).map(|(at, _)| from + at)
}

fn tag(source: &str, from: usize, is_block: bool) -> Option<Tag> {
    let closer = if is_block { "%}" } else { "}}" };
    let bytes = source.as_bytes();
    let mut tokens: Vec<Token> = Vec::new();
    let mut open = Vec::new();
    let mut at = from + usize::from(matches!(bytes.get(from), Some(b'-' | b'+')));
    loop {
        let rest = &source[at..];
        let first = rest.chars().next()?;
        if open.is_empty() {
            let inner = rest.strip_prefix(['-', '+']).unwrap_or(rest);
            if inner.starts_with(closer) {
                let end = at + (rest.len() - inner.len()) + closer.len();
                return Some(Tag { is_block, tokens, closer: at..end });
            }
        }
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        let (kind, length) = token(rest, first)?;
        let index = tokens.len();
        match kind {
            Kind::Open => open.push(index),
            Kind::Close => {
                if let Some(opened) = open.pop() {
                    tokens[opened].close = index;
                }
            }
            _ => {}
        }
        tokens.push(Token { kind, start: at, end: at + length, close: index });
        at += length;
    }
}

/// The kind and the length of the token that a text begins with; `None` if a string is not closed.
fn token(rest: &str, first: char) -> Option<(Kind, usize)> {
    let while_true = |is: fn(char) -> bool| rest.find(|character| !is(character)).unwrap_or(rest.len());
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    Some(match first {
        '"' | '\'' => (Kind::Literal, string_length(rest, first)?),
        '0'..='9' => (Kind::Literal, while_true(is_word)),
        _ if is_word(first) => (Kind::Name, while_true(is_word)),
        '(' | '[' | '{' => (Kind::Open, 1),
        ')' | ']' | '}' => (Kind::Close, 1),
        _ => {
            let two = ["**", "//", "==", "!=", "<=", ">="].iter().any(|two| rest.starts_with(two));
            (Kind::Operator, if two { 2 } else { first.len_utf8() })
        }
    })
}

fn string_length(rest: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// A part of the source that is replaced.
struct Edit {
    at: usize,
    bytes: usize,
    text: Cow<'static, str>,
}

/// Edits at one place are made in their order.
fn applied(source: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|edit| edit.at);
    let mut out = String::with_capacity(source.len() + edits.iter().map(|edit| edit.text.len()).sum::<usize>());
    let mut at = 0;
    for edit in edits {
        out.push_str(&source[at..edit.at]);
        out.push_str(&edit.text);
        at = edit.at + edit.bytes;
    }
    out.push_str(&source[at..]);
    out
}

/// Hugging Face's tags around what the model writes. What is between them is rendered, and
/// variables that are set there are not seen outside.
fn generation(source: &str, tag: &Tag, edits: &mut Vec<Edit>) {
    let text = match tag.name(source) {
        "generation" => "with",
        "endgeneration" => "endwith",
        _ => return,
    };
    let name = tag.tokens[0];
    edits.push(Edit { at: name.start, bytes: name.end - name.start, text: text.into() });
}

/// Words after which an expression begins.
const KEYWORDS: [&str; 8] = ["and", "or", "not", "if", "else", "elif", "in", "is"];

/// Where the sum and the product that are read began, in an open bracket.
#[derive(Clone, Copy)]
struct Begun {
    sum: usize,
    product: usize,
}

/// `a * b % c` becomes `(a * b)|__modulo(c)`: filters bind closer than operators, and the operators
/// of products are taken from the left. So are those of sums, if there may be safe texts in them.
fn operators(source: &str, tag: &Tag, has_safe: bool, edits: &mut Vec<Edit>) {
    let tokens = &tag.tokens;
    let mut begun = vec![Begun { sum: 0, product: 0 }];
    let mut wants_operand = true;
    for (index, token) in tokens.iter().enumerate() {
        let Some(inner) = begun.last_mut() else { return };
        let next = Begun { sum: index + 1, product: index + 1 };
        match (token.kind, token.text(source)) {
            (Kind::Open, _) => {
                begun.push(next);
                wants_operand = true;
            }
            (Kind::Close, _) => {
                if begun.len() > 1 {
                    begun.pop();
                }
                wants_operand = false;
            }
            (Kind::Literal, _) => wants_operand = false,
            (Kind::Name, name) => {
                wants_operand = KEYWORDS.contains(&name) || (tag.is_block && index == 0);
                if wants_operand {
                    *inner = next;
                }
            }
            (Kind::Operator, "%") if !wants_operand => {
                let Some(end) = operand_end(source, tokens, index + 1) else { return };
                replace_operator(tokens, inner.product, index, end, MODULO, edits);
                wants_operand = true;
            }
            (Kind::Operator, "+") if !wants_operand && has_safe => {
                let Some(end) = product_end(source, tokens, index + 1) else { return };
                replace_operator(tokens, inner.sum, index, end, PLUS, edits);
                inner.product = index + 1;
                wants_operand = true;
            }
            (Kind::Operator, "*" | "**" | "/" | "//") if !wants_operand => wants_operand = true,
            // The engine knows no sign that does nothing.
            (Kind::Operator, "+") if wants_operand => {
                edits.push(Edit { at: token.start, bytes: 1, text: "".into() });
            }
            (Kind::Operator, "-") if wants_operand => {}
            (Kind::Operator, "." | "|") => wants_operand = true,
            (Kind::Operator, "-" | "+" | "~") => {
                inner.product = index + 1;
                wants_operand = true;
            }
            (Kind::Operator, _) => {
                *inner = next;
                wants_operand = true;
            }
        }
    }
}

/// Makes a filter of an operator: `left` is the first token of its left operand, `right` the last
/// of its right one.
fn replace_operator(tokens: &[Token], left: usize, operator: usize, right: usize, filter: &str, edits: &mut Vec<Edit>) {
    edits.push(Edit { at: tokens[left].start, bytes: 0, text: "(".into() });
    edits.push(Edit { at: tokens[operator].start, bytes: 1, text: format!(")|{filter}(").into() });
    edits.push(Edit { at: tokens[right].end, bytes: 0, text: ")".into() });
}

/// The last token of the operand of a sum: products and `~` bind closer.
fn product_end(source: &str, tokens: &[Token], from: usize) -> Option<usize> {
    let mut end = operand_end(source, tokens, from)?;
    let binds_closer = |token: &Token| ["~", "*", "/", "//", "%"].iter().any(|operator| token.is(source, operator));
    while tokens.get(end + 1).is_some_and(binds_closer) {
        end = operand_end(source, tokens, end + 2)?;
    }
    Some(end)
}

/// The last token of the operand that begins there: a value with its signs, subscripts, calls,
/// filters, tests and powers.
fn operand_end(source: &str, tokens: &[Token], from: usize) -> Option<usize> {
    let mut end = value_end(source, tokens, from)?;
    while let Some(next) = tokens.get(end + 1) {
        end = match (next.kind, next.text(source)) {
            (Kind::Operator, "." | "|") => end + 2,
            (Kind::Operator, "**") => value_end(source, tokens, end + 2)?,
            (Kind::Name, "is") => end + 2 + usize::from(tokens.get(end + 2)?.is(source, "not")),
            // Texts that stand side by side are one.
            (Kind::Open, "(" | "[") | (Kind::Literal, _) => next.close,
            _ => break,
        };
        tokens.get(end)?;
    }
    Some(end)
}

/// The last token of a value with its signs.
fn value_end(source: &str, tokens: &[Token], from: usize) -> Option<usize> {
    let is_sign = |token: &&Token| token.is(source, "-") || token.is(source, "+");
    let signs = tokens.get(from..)?.iter().take_while(is_sign).count();
    Some(tokens.get(from + signs)?.close)
}

/// Tuples may stand without brackets in `{{ a, b }}` and `{% for x in a, b %}`.
fn tuple(source: &str, tag: &Tag, edits: &mut Vec<Edit>) {
    let tokens = &tag.tokens;
    let is = |index: usize, text: &str| tokens[index].is(source, text);
    let mut begin = 0;
    let mut end = tokens.len();
    let mut closer = ")";
    if tag.name(source) == "for" {
        let Some(word) = outside_brackets(tokens, 0).find(|&index| is(index, "in")) else { return };
        begin = word + 1;
        end = outside_brackets(tokens, begin).find(|&index| is(index, "if") || is(index, "recursive")).unwrap_or(end);
        closer = ")|__items";
    } else if tag.is_block || !outside_brackets(tokens, 0).any(|index| is(index, ",")) {
        return;
    }
    let (Some(first), Some(last)) = (tokens.get(begin), tokens.get(end.wrapping_sub(1))) else { return };
    if begin < end {
        edits.push(Edit { at: first.start, bytes: 0, text: "(".into() });
        edits.push(Edit { at: last.end, bytes: 0, text: closer.into() });
    }
}

/// Places of the tokens from one on that are in no bracket after it.
fn outside_brackets(tokens: &[Token], from: usize) -> impl Iterator<Item = usize> {
    let next = |&index: &usize| Some(tokens.get(index)?.close + 1);
    iter::successors(Some(from), next).take_while(|&index| index < tokens.len())
}

/// What is kept in a variable, or given to a macro, has no more levels than can be gone through by
/// recursion: a loop could put a list into another a million times.
fn stored(source: &str, tag: &Tag, edits: &mut Vec<Edit>) {
    let tokens = &tag.tokens;
    let name = tag.name(source);
    if let ("macro", [_, _, parameters @ .., _]) = (name, &tokens[..]) {
        let closer = &source[tag.closer.clone()];
        let checks = parameter_names(source, parameters).into_iter();
        let text = checks.map(|name| format!("{{% set {name} = {name}|{STORED} {closer}")).collect::<String>();
        edits.push(Edit { at: tag.closer.end, bytes: 0, text: text.into() });
    }
    if name != "set" && name != "with" {
        return;
    }
    for sign in outside_brackets(tokens, 0).filter(|&index| tokens[index].is(source, "=")) {
        let ends_value = |&index: &usize| name == "with" && tokens[index].is(source, ",");
        let end = outside_brackets(tokens, sign + 1).find(ends_value).unwrap_or(tokens.len());
        if sign + 1 < end {
            edits.push(Edit { at: tokens[sign + 1].start, bytes: 0, text: "(".into() });
            edits.push(Edit { at: tokens[end - 1].end, bytes: 0, text: format!(")|{STORED}").into() });
        }
    }
}

/// The most filters that a tag has.
pub(crate) fn longest_chain(source: &str) -> usize {
    let filters = |tag: &Tag| tag.tokens.iter().filter(|token| token.is(source, "|")).count();
    tags(source).iter().map(filters).max().unwrap_or(0)
}

/// The end of a line after `{% raw %}` stays.
fn raw(source: &str, tag: &Tag, edits: &mut Vec<Edit>) {
    let is_plain = source[tag.closer.clone()].starts_with('%');
    if tag.name(source) == "raw" && is_plain && source[tag.closer.end..].starts_with('\n') {
        edits.push(Edit { at: tag.closer.start, bytes: 0, text: "+".into() });
    }
}

/// A macro whose end is not read yet.
struct OpenMacro<'t> {
    tag: &'t Tag,
    takes_any: bool,
}

/// Jinja2 gives a macro the arguments that it has no names for, if it speaks of them. Such a macro
/// gets another name and two more parameters, and its own name stands for a function that sorts
/// arguments.
fn variadic(source: &str, tags: &[Tag], edits: &mut Vec<Edit>) {
    let mut open: Vec<OpenMacro<'_>> = Vec::new();
    for tag in tags {
        match tag.name(source) {
            "macro" => open.push(OpenMacro { tag, takes_any: false }),
            "endmacro" => {
                let Some(ended) = open.pop() else { return };
                if ended.takes_any {
                    take_any(source, ended.tag, tag, edits);
                }
            }
            _ => {
                let names_any =
                    tag.tokens.iter().any(|token| token.is(source, "varargs") || token.is(source, "kwargs"));
                if let Some(inner) = open.last_mut() {
                    inner.takes_any |= names_any;
                }
            }
        }
    }
}

fn take_any(source: &str, begin: &Tag, end: &Tag, edits: &mut Vec<Edit>) {
    let [_, name, parameters @ .., last] = &begin.tokens[..] else { return };
    let (Kind::Name, Kind::Close) = (name.kind, last.kind) else { return };
    let names = parameter_names(source, parameters);
    let own = name.text(source);
    edits.push(Edit { at: name.end, bytes: 0, text: NAMED.into() });
    let comma = if names.is_empty() || parameters.last().is_some_and(|last| last.is(source, ",")) { "" } else { ", " };
    edits.push(Edit { at: last.start, bytes: 0, text: format!("{comma}varargs=(), kwargs={{}}").into() });
    let closer = &source[end.closer.clone()];
    let text = format!("{{% set {own} = {VARIADIC}({own}{NAMED}, {names:?}) {closer}");
    edits.push(Edit { at: end.closer.end, bytes: 0, text: text.into() });
}

/// Names before the first bracket's commas and `=`.
fn parameter_names<'s>(source: &'s str, parameters: &[Token]) -> Vec<&'s str> {
    let mut names = Vec::new();
    let mut depth = 0;
    let mut is_name = true;
    for token in parameters {
        match token.kind {
            Kind::Open => depth += 1,
            Kind::Close => depth -= 1,
            Kind::Name if depth == 1 && is_name => names.push(token.text(source)),
            _ => {}
        }
        is_name = depth == 1 && (token.kind == Kind::Open || token.is(source, ","));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks sources, each beside what it becomes.
    fn assert_rewritten(cases: &[(&str, &str)]) {
        for (source, expected) in cases {
            assert_eq!(rewritten(source), *expected, "{source}");
        }
    }

    #[test]
    fn modulo_becomes_a_filter_of_its_product() {
        let cases = [
            ("{{ '%s' % x }}", "{{ ('%s' )|__modulo( x) }}"),
            ("{{ a + b * c % d ~ e }}", "{{ a + (b * c )|__modulo( d) ~ e }}"),
            ("{{ a%b%c }}", "{{ ((a)|__modulo(b))|__modulo(c) }}"),
            ("{{ -7 % 3|abs }}", "{{ (-7 )|__modulo( 3|abs) }}"),
            ("{% if i.x[0] % 2 == 0 %}{% endif %}", "{% if (i.x[0] )|__modulo( 2) == 0 %}{% endif %}"),
            (
                "{%- set x = f(1 % 2, '%}') % (a, b) -%}",
                "{%- set x = ((f((1 )|__modulo( 2), '%}') )|__modulo( (a, b)))|__stored -%}",
            ),
            ("{{ x if not a % b is none else c }}", "{{ x if not (a )|__modulo( b is none) else c }}"),
            (
                "{{ a % b ** c.d | e(1) }}{# a % b #}{% raw %}{{ a % b }}{% endraw %}",
                "{{ (a )|__modulo( b ** c.d | e(1)) }}{# a % b #}{% raw %}{{ a % b }}{% endraw %}",
            ),
            ("a % b {{ {'%': {}} }} {{ '\\'%' }}", "a % b {{ {'%': {}} }} {{ '\\'%' }}"),
            ("{{ a % }}{{ 'open % x }}", "{{ a % }}{{ 'open % x }}"),
        ];
        assert_rewritten(&cases);
    }

    #[test]
    fn plus_becomes_a_filter_of_its_sum_beside_safe_texts() {
        let cases = [
            ("{{ a + b }}", "{{ a + b }}"),
            ("{{ a|safe + b * c ~ d + e }}", "{{ ((a|safe )|__plus( b * c ~ d) )|__plus( e) }}"),
            ("{{ a|e+b%c+d }}", "{{ ((a|e)|__plus((b)|__modulo(c)))|__plus(d) }}"),
            ("{{ x == a|e - 1 + b if y }}", "{{ x == (a|e - 1 )|__plus( b) if y }}"),
        ];
        assert_rewritten(&cases);
    }

    #[test]
    fn tuples_get_brackets_and_stored_values_a_check() {
        let cases = [
            ("{{ a, b }}{{ (a, b) }}", "{{ (a, b) }}{{ (a, b) }}"),
            ("{% for x in 1, 2 if x %}", "{% for x in (1, 2)|__items if x %}"),
            ("{% for a, (b, c) in d recursive %}", "{% for a, (b, c) in (d)|__items recursive %}"),
            ("{% set a, b = 1, f(c=2) %}", "{% set a, b = (1, f(c=2))|__stored %}"),
            ("{% with a = 1, b = (2, 3) %}", "{% with a = (1)|__stored, b = ((2, 3))|__stored %}"),
            ("{% for %}{% for x in %}{% set %}{% set = %}", "{% for %}{% for x in %}{% set %}{% set = %}"),
            ("{% raw %}\n{% endraw %}{{ +1 - +2 }}", "{% raw +%}\n{% endraw %}{{ 1 - 2 }}"),
        ];
        assert_rewritten(&cases);
    }

    #[test]
    fn generation_tags_are_replaced_and_nothing_else() {
        let cases = [
            ("a{% generation %}b{% endgeneration %}c", "a{% with %}b{% endwith %}c"),
            ("{%- generation -%}\nb\n{%-endgeneration-%}", "{%- with -%}\nb\n{%-endwith-%}"),
            ("{%+generation%}{% endgeneration +%}", "{%+with%}{% endwith +%}"),
            (
                "{% if generation %}{{ generation }}{% endif %}{# {% endgeneration %} {% raw %} #}{% generation %}",
                "{% if generation %}{{ generation }}{% endif %}{# {% endgeneration %} {% raw %} #}{% with %}",
            ),
            (
                "{% raw %}{# {% endgeneration %}{% endraw %}{% endgeneration %}{# open",
                "{% raw %}{# {% endgeneration %}{% endraw %}{% endwith %}{# open",
            ),
            ("endgeneration {% add_generation_prompt %", "endgeneration {% add_generation_prompt %"),
        ];
        assert_rewritten(&cases);
    }

    #[test]
    fn macro_that_speaks_of_varargs_takes_any_arguments() {
        let source = "{% macro f(a, b=[1, c]) -%}{{ varargs }}{%- endmacro -%} x";
        let expected = "{% macro f__named(a, b=[1, c], varargs=(), kwargs={}) -%}{% set a = a|__stored -%}{% set b = b|__stored -%}{{ varargs }}{%- endmacro -%}{% set f = __variadic(f__named, [\"a\", \"b\"]) -%} x";
        assert_eq!(rewritten(source), expected);
        let plain = "{% macro f() %}{{ a }}{% endmacro %}{{ kwargs }}";
        assert_eq!(rewritten(plain), plain);
    }

    #[test]
    fn filters_and_tests_are_named_with_their_lines() {
        let found = named("{{ a | upper }}\n{% if b is not string %}\n{{ '| x' }}{{ c|map('upper')|list }}");
        let found: Vec<_> = found.iter().map(|named| (named.name, named.is_test, named.line)).collect();
        assert_eq!(found, [("upper", false, 1), ("string", true, 2), ("map", false, 3), ("list", false, 3)]);
    }
}

//! Reads regular expressions as JSON Schema has them: those of ECMA-262, and what Python and Rust
//! write beyond.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, HirKind};

/// Most groups in groups.
const MAX_DEPTH: usize = 64;
/// Longest expression, characters.
const MAX_CHARS: usize = 16 << 10;
/// Most ranges of characters, all classes together: those of letters have some 700.
const MAX_RANGES: usize = 40_000;

/// A part of a regular expression.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::schema) enum Node {
    /// One character of these.
    Class(ClassUnicode),
    Concat(Vec<Node>),
    Either(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
    /// The start of the text.
    Start,
    /// The end of the text.
    End,
    /// A place that is, or is not, between a character of a word and another one.
    WordBoundary {
        is: bool,
    },
    /// What comes next has, or has not, this form.
    Ahead {
        is: bool,
        node: Box<Node>,
    },
}

impl Node {
    /// One character.
    pub(in crate::schema) fn char(c: char) -> Self {
        Self::Class(class(&[(c, c)]))
    }

    /// Any one character.
    pub(in crate::schema) fn any() -> Self {
        Self::Class(all())
    }

    /// A text, to the letter.
    pub(in crate::schema) fn text(text: &str) -> Self {
        Self::Concat(text.chars().map(Self::char).collect())
    }

    /// So many of this.
    pub(in crate::schema) fn times(self, min: u32, max: Option<u32>) -> Self {
        Self::Repeat { node: Box::new(self), min, max }
    }

    /// Whether it looks around, or at an end of the text.
    pub(in crate::schema) fn looks(&self) -> bool {
        match self {
            Self::Class(_) => false,
            Self::Concat(nodes) | Self::Either(nodes) => nodes.iter().any(Self::looks),
            Self::Repeat { node, .. } => node.looks(),
            Self::Start | Self::End | Self::WordBoundary { .. } | Self::Ahead { .. } => true,
        }
    }
}

pub(in crate::schema) fn class(ranges: &[(char, char)]) -> ClassUnicode {
    ClassUnicode::new(ranges.iter().map(|&(first, last)| ClassUnicodeRange::new(first, last)))
}

pub(in crate::schema) fn all() -> ClassUnicode {
    class(&[('\0', char::MAX)])
}

/// The characters of a word.
pub(in crate::schema) fn word() -> ClassUnicode {
    class(&[('0', '9'), ('A', 'Z'), ('_', '_'), ('a', 'z')])
}

/// Ends of lines, which `.` does not match.
const LINE_ENDS: [(char, char); 3] = [('\n', '\n'), ('\r', '\r'), ('\u{2028}', '\u{2029}')];
const SPACES: [(char, char); 9] = [
    ('\t', '\r'),
    (' ', ' '),
    ('\u{a0}', '\u{a0}'),
    ('\u{1680}', '\u{1680}'),
    ('\u{2000}', '\u{200a}'),
    ('\u{2028}', '\u{2029}'),
    ('\u{202f}', '\u{202f}'),
    ('\u{205f}', '\u{205f}'),
    ('\u{3000}', '\u{3000}'),
];

/// Reads a regular expression.
///
/// # Errors
/// It is none, or no language of finite automata.
pub(in crate::schema) fn parse(pattern: &str) -> Result<Node, String> {
    let mut parser =
        Parser { chars: pattern.chars().collect(), at: 0, depth: 0, ranges: 0, folds: false, dot_is_all: false };
    if parser.chars.len() > MAX_CHARS {
        return Err(format!("the regex has more than {MAX_CHARS} characters"));
    }
    let node = parser.either()?;
    match parser.peek() {
        None => Ok(node),
        Some(_) => Err("invalid regex: unopened group".to_owned()),
    }
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    depth: usize,
    /// Ranges of all classes.
    ranges: usize,
    /// Whether upper case is lower case.
    folds: bool,
    dot_is_all: bool,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek();
        self.at += usize::from(c.is_some());
        c
    }

    fn eat(&mut self, text: &str) -> bool {
        let is_next = text.chars().eq(self.chars[self.at..].iter().copied().take(text.chars().count()));
        self.at += if is_next { text.chars().count() } else { 0 };
        is_next
    }

    fn either(&mut self) -> Result<Node, String> {
        let mut parts = vec![self.concat()?];
        while self.eat("|") {
            parts.push(self.concat()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Node::Either(parts) })
    }

    fn concat(&mut self) -> Result<Node, String> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek().filter(|c| !matches!(c, '|' | ')')) {
            self.at += 1;
            let part = self.part(c)?;
            if let Node::Class(class) = &part {
                self.ranges += class.ranges().len();
            }
            if self.ranges > MAX_RANGES {
                return Err("the regex is too complex".to_owned());
            }
            parts.push(self.repeated(part)?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Node::Concat(parts) })
    }

    fn part(&mut self, c: char) -> Result<Node, String> {
        match c {
            '^' => Ok(Node::Start),
            '$' => Ok(Node::End),
            '(' => self.group(),
            '[' => self.class().map(Node::Class),
            '.' if self.dot_is_all => Ok(Node::any()),
            '.' => Ok(Node::Class(negated(class(&LINE_ENDS)))),
            '\\' => self.escaped(),
            '*' | '+' | '?' => Err(format!("invalid regex: '{c}' repeats nothing")),
            c => Ok(self.folded(class(&[(c, c)]))),
        }
    }

    fn folded(&self, mut class: ClassUnicode) -> Node {
        if self.folds {
            class.case_fold_simple();
        }
        Node::Class(class)
    }

    fn group(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("the regex has more than {MAX_DEPTH} groups in groups"));
        }
        let flags = (self.folds, self.dot_is_all);
        let ahead = self.opened()?;
        // Flags by themselves hold on; others hold in their group.
        let holds_on = self.peek() == Some(')') && flags != (self.folds, self.dot_is_all);
        let node = self.either()?;
        if !self.eat(")") {
            return Err("invalid regex: unclosed group".to_owned());
        }
        self.depth -= 1;
        if !holds_on {
            (self.folds, self.dot_is_all) = flags;
        }
        Ok(match ahead {
            Some(is) => Node::Ahead { is, node: Box::new(node) },
            None => node,
        })
    }

    /// Reads what comes after the parenthesis of a group: whether it is a look-ahead, and of which
    /// kind.
    fn opened(&mut self) -> Result<Option<bool>, String> {
        if !self.eat("?") || self.eat(":") {
            return Ok(None);
        }
        if self.eat("=") {
            return Ok(Some(true));
        }
        if self.eat("!") {
            return Ok(Some(false));
        }
        if self.eat("<=") || self.eat("<!") {
            return Err("look-behinds are not supported".to_owned());
        }
        if self.eat("P=") {
            return Err("backreferences are not supported".to_owned());
        }
        if self.eat("<") || self.eat("P<") {
            return self.name('>').map(|_| None);
        }
        self.flags()
    }

    fn flags(&mut self) -> Result<Option<bool>, String> {
        while let Some(c) = self.next() {
            match c {
                'i' => self.folds = true,
                's' => self.dot_is_all = true,
                'u' => {}
                ':' => return Ok(None),
                // They hold up to the end of the expression.
                ')' if self.depth == 1 => {
                    self.at -= 1;
                    return Ok(None);
                }
                _ => break,
            }
        }
        Err("invalid regex: unknown group".to_owned())
    }

    fn name(&mut self, end: char) -> Result<String, String> {
        let mut name = String::new();
        loop {
            match self.next() {
                Some(c) if c == end && !name.is_empty() => return Ok(name),
                Some(c) if c.is_alphanumeric() || "_$=-. ".contains(c) => name.push(c),
                _ => return Err("invalid regex: a name is wrong".to_owned()),
            }
        }
    }

    fn repeated(&mut self, node: Node) -> Result<Node, String> {
        let Some((min, max)) = self.counts()? else { return Ok(node) };
        if max.is_some_and(|max| max < min) {
            return Err("invalid regex: a repetition's counts are out of order".to_owned());
        }
        // What is lazy has the same language.
        self.eat("?");
        if self.counts()?.is_some() {
            return Err("invalid regex: a repetition repeats nothing".to_owned());
        }
        match node {
            // They are there as often as one likes, at the same place.
            Node::Start | Node::End | Node::WordBoundary { .. } | Node::Ahead { .. } if min > 0 => Ok(node),
            Node::Start | Node::End | Node::WordBoundary { .. } | Node::Ahead { .. } => Ok(Node::Concat(Vec::new())),
            node => Ok(node.times(min, max)),
        }
    }

    fn counts(&mut self) -> Result<Option<(u32, Option<u32>)>, String> {
        let before = self.at;
        match self.next() {
            Some('*') => Ok(Some((0, None))),
            Some('+') => Ok(Some((1, None))),
            Some('?') => Ok(Some((0, Some(1)))),
            Some('{') => {
                let counts = self.braced()?;
                if counts.is_none() {
                    self.at = before;
                }
                Ok(counts)
            }
            _ => {
                self.at = before;
                Ok(None)
            }
        }
    }

    /// Counts in braces, the first of which has been read. Other braces are text.
    fn braced(&mut self) -> Result<Option<(u32, Option<u32>)>, String> {
        let Some(min) = self.number()? else { return Ok(None) };
        let max = if self.eat(",") { self.number()? } else { Some(min) };
        Ok(self.eat("}").then_some((min, max)))
    }

    fn number(&mut self) -> Result<Option<u32>, String> {
        let digits: String = self.chars[self.at..].iter().take_while(|c| c.is_ascii_digit()).collect();
        self.at += digits.len();
        if digits.is_empty() {
            return Ok(None);
        }
        digits.parse().map(Some).map_err(|_| "invalid regex: a repetition's count is too large".to_owned())
    }

    fn escaped(&mut self) -> Result<Node, String> {
        match self.peek() {
            Some('b' | 'B') => Ok(Node::WordBoundary { is: self.next() == Some('b') }),
            // Python's and Rust's ends of the text.
            Some('A') => {
                self.at += 1;
                Ok(Node::Start)
            }
            Some('Z' | 'z') => {
                self.at += 1;
                Ok(Node::End)
            }
            Some('k' | '1'..='9') => Err("invalid regex: backreferences are not supported".to_owned()),
            _ => {
                let class = self.escaped_class()?;
                Ok(self.folded(class))
            }
        }
    }

    /// What is escaped, in a class and outside: a character, or a class of them.
    fn escaped_class(&mut self) -> Result<ClassUnicode, String> {
        let c = self.next().ok_or("invalid regex: it ends with a backslash")?;
        let one = |c| Ok(class(&[(c, c)]));
        match c {
            'd' => Ok(class(&[('0', '9')])),
            'D' => Ok(negated(class(&[('0', '9')]))),
            'w' => Ok(word()),
            'W' => Ok(negated(word())),
            's' => Ok(spaces()),
            'S' => Ok(negated(spaces())),
            'p' | 'P' => self.property(c == 'P'),
            't' => one('\t'),
            'n' => one('\n'),
            'r' => one('\r'),
            'v' => one('\u{b}'),
            'f' => one('\u{c}'),
            '0' if !self.peek().is_some_and(|c| c.is_ascii_digit()) => one('\0'),
            'x' | 'u' => self.code(c).and_then(one),
            'c' => match self.next() {
                Some(letter @ ('a'..='z' | 'A'..='Z')) => one(char::from(letter as u8 % 32)),
                _ => Err("invalid regex: \\c has no letter".to_owned()),
            },
            c if c.is_alphanumeric() => Err(format!("invalid regex: unknown escape \\{c}")),
            c => one(c),
        }
    }

    /// A character by its number: `\x41`, `\u0041`, `\u{41}`, and pairs of surrogates.
    fn code(&mut self, kind: char) -> Result<char, String> {
        const WRONG: &str = "invalid regex: a character's number is wrong";
        if self.eat("{") {
            let number = self.name('}')?;
            return u32::from_str_radix(&number, 16).ok().and_then(char::from_u32).ok_or_else(|| WRONG.to_owned());
        }
        let first = self.hexadecimal(if kind == 'x' { 2 } else { 4 }).ok_or(WRONG)?;
        if (0xd800..0xdc00).contains(&first) && self.eat("\\u") {
            let second = self.hexadecimal(4).filter(|second| (0xdc00..0xe000).contains(second)).ok_or(WRONG)?;
            return char::from_u32(0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00)).ok_or(WRONG.to_owned());
        }
        char::from_u32(first).ok_or(WRONG.to_owned())
    }

    fn hexadecimal(&mut self, digits: usize) -> Option<u32> {
        let text: String = self.chars.get(self.at..self.at + digits)?.iter().collect();
        self.at += digits;
        u32::from_str_radix(&text, 16).ok()
    }

    /// The characters of a property of Unicode.
    fn property(&mut self, is_negated: bool) -> Result<ClassUnicode, String> {
        let name = match self.next() {
            Some('{') => self.name('}')?,
            Some(c) if c.is_alphabetic() => c.to_string(),
            _ => return Err("invalid regex: \\p has no property".to_owned()),
        };
        let parsed = regex_syntax::parse(&format!("\\p{{{name}}}")).map(|hir| hir.into_kind());
        match parsed {
            Ok(HirKind::Class(Class::Unicode(class))) => Ok(if is_negated { negated(class) } else { class }),
            _ => Err(format!("invalid regex: unknown property \\p{{{name}}}")),
        }
    }

    /// A class, whose bracket has been read.
    fn class(&mut self) -> Result<ClassUnicode, String> {
        let is_negated = self.eat("^");
        let mut class = ClassUnicode::empty();
        loop {
            let c = self.next().ok_or("invalid regex: unclosed character class")?;
            if c == ']' {
                break;
            }
            let first = self.member(c)?;
            // A dash at the end is one.
            let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|&c| c != ']');
            if !is_range {
                class.union(&first);
                continue;
            }
            self.at += 1;
            let c = self.next().unwrap_or(']');
            let last = self.member(c)?;
            match (only(&first), only(&last)) {
                (Some(first), Some(last)) if first <= last => class.push(ClassUnicodeRange::new(first, last)),
                (Some(_), Some(_)) => {
                    let problem = "invalid character class range, the start must be <= the end";
                    return Err(format!("invalid regex: {problem}"));
                }
                // With a class on one side the dash is one.
                _ => {
                    class.union(&first);
                    class.union(&last);
                    class.push(ClassUnicodeRange::new('-', '-'));
                }
            }
        }
        if self.folds {
            class.case_fold_simple();
        }
        Ok(if is_negated { negated(class) } else { class })
    }

    fn member(&mut self, c: char) -> Result<ClassUnicode, String> {
        match c {
            '\\' if self.eat("b") => Ok(class(&[('\u{8}', '\u{8}')])),
            '\\' => self.escaped_class(),
            c => Ok(class(&[(c, c)])),
        }
    }
}

fn spaces() -> ClassUnicode {
    let mut spaces = class(&SPACES);
    spaces.push(ClassUnicodeRange::new('\u{feff}', '\u{feff}'));
    spaces
}

fn negated(mut class: ClassUnicode) -> ClassUnicode {
    class.negate();
    class
}

/// The only character of a class.
fn only(class: &ClassUnicode) -> Option<char> {
    match class.ranges() {
        [range] if range.start() == range.end() => Some(range.start()),
        _ => None,
    }
}

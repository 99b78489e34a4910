//! Reads where a regular expression looks ahead. The rest of it stays text.

/// Most groups in groups.
const MAX_DEPTH: usize = 32;
/// Longest expression with look-aheads, characters.
const MAX_CHARS: usize = 4 << 10;

/// Alternatives, each of parts that come one after the other.
pub(super) type Branches = Vec<Vec<Part>>;

/// A part of a regular expression.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Part {
    /// An expression without look-aheads.
    Text(String),
    /// A group with look-aheads in it.
    Group(Branches),
    /// What comes next has, or has not, this form.
    Ahead { is: bool, branches: Branches },
}

/// Whether an expression has look-aheads or look-behinds.
pub(super) fn looks_around(pattern: &str) -> bool {
    ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|look| pattern.contains(look))
}

/// Reads a regular expression.
///
/// # Errors
/// Groups of the expression are wrong, or it has what is not served.
pub(super) fn parse(pattern: &str) -> Result<Branches, String> {
    let mut parser = Parser { chars: pattern.chars().collect(), at: 0, depth: 0 };
    if parser.chars.len() > MAX_CHARS {
        return Err(format!("a regex with look-aheads has more than {MAX_CHARS} characters"));
    }
    let branches = parser.branches()?;
    match parser.peek() {
        None => Ok(branches),
        Some(_) => Err("invalid regex: unopened group".to_owned()),
    }
}

/// The expression as a text, if it has no look-aheads.
pub(super) fn plain_text(branches: &Branches) -> Option<String> {
    let texts = branches.iter().map(|parts| parts.iter().map(part_text).collect());
    texts.collect::<Option<Vec<String>>>().map(|texts| texts.join("|"))
}

fn part_text(part: &Part) -> Option<String> {
    match part {
        Part::Text(text) => Some(text.clone()),
        Part::Group(branches) => plain_text(branches).map(|text| format!("(?:{text})")),
        Part::Ahead { .. } => None,
    }
}

/// What a group's first characters say of it.
enum Opening {
    Group,
    Ahead { is: bool },
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    depth: usize,
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
        let length = text.chars().count();
        let is_next = text.chars().eq(self.chars[self.at..].iter().copied().take(length));
        self.at += if is_next { length } else { 0 };
        is_next
    }

    fn text_since(&self, start: usize) -> String {
        self.chars[start..self.at].iter().collect()
    }

    fn branches(&mut self) -> Result<Branches, String> {
        let mut branches = vec![self.parts()?];
        while self.eat("|") {
            branches.push(self.parts()?);
        }
        Ok(branches)
    }

    fn parts(&mut self) -> Result<Vec<Part>, String> {
        let mut parts = Vec::new();
        let mut text = String::new();
        while let Some(c) = self.peek().filter(|c| !matches!(c, '|' | ')')) {
            let start = self.at;
            let part = if c == '(' { self.group()? } else { self.one()? };
            match part {
                None => text.push_str(&self.text_since(start)),
                Some(part) => {
                    if !text.is_empty() {
                        parts.push(Part::Text(std::mem::take(&mut text)));
                    }
                    parts.push(part);
                }
            }
        }
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
        Ok(parts)
    }

    /// Reads a character, an escaped one, or a class of characters.
    fn one(&mut self) -> Result<Option<Part>, String> {
        match self.next() {
            Some('\\') => _ = self.next(),
            Some('[') => self.class()?,
            _ => {}
        }
        Ok(None)
    }

    fn class(&mut self) -> Result<(), String> {
        self.eat("^");
        // A bracket that comes first closes nothing.
        self.eat("]");
        loop {
            match self.next() {
                Some('\\') => _ = self.next(),
                Some(']') => return Ok(()),
                Some(_) => {}
                None => return Err("invalid regex: unclosed character class".to_owned()),
            }
        }
    }

    /// Reads a group: nothing if it has no look-aheads.
    fn group(&mut self) -> Result<Option<Part>, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("the regex has more than {MAX_DEPTH} groups in groups"));
        }
        let opening = self.opening()?;
        let mut branches = self.branches()?;
        if !self.eat(")") {
            return Err("invalid regex: unclosed group".to_owned());
        }
        self.depth -= 1;
        let is_plain = plain_text(&branches).is_some();
        let is_optional = self.eat("?");
        let is_repeated = self.peek().is_some_and(|c| matches!(c, '*' | '+' | '{'));
        match opening {
            Opening::Group if is_plain => Ok(None),
            _ if is_repeated => Err("look-aheads that are repeated are not served".to_owned()),
            Opening::Ahead { .. } if is_optional => Err("look-aheads that are optional are not served".to_owned()),
            Opening::Ahead { is } => Ok(Some(Part::Ahead { is, branches })),
            Opening::Group => {
                if is_optional {
                    // Whether as much as can be is taken does not change what matches.
                    self.eat("?");
                    branches.push(Vec::new());
                }
                Ok(Some(Part::Group(branches)))
            }
        }
    }

    /// Reads a parenthesis and what says which kind of group it opens.
    fn opening(&mut self) -> Result<Opening, String> {
        self.at += 1;
        if !self.eat("?") || self.eat(":") {
            return Ok(Opening::Group);
        }
        match self.next() {
            Some('=') => return Ok(Opening::Ahead { is: true }),
            Some('!') => return Ok(Opening::Ahead { is: false }),
            Some('<') if matches!(self.peek(), Some('=' | '!')) => {
                return Err("look-behinds are not supported".to_owned());
            }
            Some('P') if self.eat("<") => {}
            Some('<') => {}
            _ => return Err("flags beside look-aheads are not served".to_owned()),
        }
        while self.next().is_some_and(|c| c != '>') {}
        Ok(Opening::Group)
    }
}

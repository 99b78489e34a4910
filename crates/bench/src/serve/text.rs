//! Drawn text for prompts: common words in sentences, so that tokenizers make about as many tokens
//! of it as of English.

use baton_sim::Random;

const WORDS: [&str; 128] = [
    "the", "river", "carries", "more", "water", "in", "spring", "than", "at", "any", "other", "time", "of", "year",
    "and", "people", "who", "live", "beside", "it", "have", "learned", "to", "watch", "hills", "for", "signs", "when",
    "snow", "begins", "melt", "they", "move", "their", "animals", "higher", "ground", "before", "first", "heavy",
    "rain", "market", "opens", "early", "on", "these", "days", "because", "people", "wants", "be", "caught", "road",
    "after", "dark", "old", "bridge", "was", "built", "by", "hand", "from", "stone", "that", "came", "across",
    "valley", "its", "three", "arches", "still", "stand", "although", "one", "them", "has", "been", "repaired", "so",
    "often", "little", "remains", "original", "work", "children", "cross", "every", "morning", "way", "school",
    "count", "boats", "below", "some", "go", "down", "coast", "with", "wood", "grain", "while", "others", "bring",
    "salt", "cloth", "letters", "back", "again", "there", "is", "a", "story", "about", "ferryman", "could", "tell",
    "weather", "sound", "wind", "reeds", "never", "wrong", "until", "year", "great", "flood", "which", "we",
];

/// Exactly `chars` characters, all of one byte; the same for the same seed. Ends in mid-word if it
/// must.
pub fn prose(seed: u64, chars: usize) -> String {
    let mut random = Random::new(seed);
    let mut text = String::with_capacity(chars + 16);
    let mut left = 0;
    while text.len() < chars {
        let word = WORDS[random.below(WORDS.len() as u64) as usize];
        if left == 0 {
            left = 6 + random.below(9);
            text.extend(word[..1].chars().map(|c| c.to_ascii_uppercase()).chain(word[1..].chars()));
        } else {
            text.push_str(word);
        }
        left -= 1;
        text.push_str(if left == 0 { ". " } else { " " });
    }
    text.truncate(chars);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_prompt_has_its_length_and_depends_on_the_seed() {
        for chars in [0, 1, 2, 300, 6000] {
            assert_eq!(prose(7, chars).len(), chars);
        }
        assert_eq!(prose(7, 300), prose(7, 6000)[..300]);
        assert_ne!(prose(7, 300), prose(8, 300));
    }

    #[test]
    fn generated_prompt_is_made_of_sentences() {
        let text = prose(1, 2000);
        assert!(text.is_ascii() && text.starts_with(|c: char| c.is_ascii_uppercase()));
        assert!(text.split(". ").count() > 20 && !text.contains("  "), "{text}");
    }
}

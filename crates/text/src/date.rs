//! `strftime` in UTC, for templates that state the date.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The first of January 1970 was a Thursday.
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
/// Longest format; the longest conversion writes 9 characters.
const MAX_FORMAT_BYTES: usize = 256;

struct Date {
    days: u64,
    seconds: u64,
    year: u64,
    month: u64,
    day: u64,
}

impl Date {
    /// Years, months and days of a count of days: Hinnant, "chrono-compatible low-level date
    /// algorithms", `civil_from_days`.
    fn new(now: SystemTime) -> Self {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        let days = since / 86_400;
        let seconds = since % 86_400;
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        Self { days, seconds, year: era * 400 + year_of_era + u64::from(month <= 2), month, day }
    }

    fn conversion(&self, letter: char) -> Option<String> {
        let hour = self.seconds / 3600;
        let minute = self.seconds / 60 % 60;
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[(self.days % 7) as usize];
        Some(match letter {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{:02}", self.seconds % 60),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{:02}", self.seconds % 60),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

/// The date in UTC, by C's conversions (`%-d` and such drop the leading zero); an error names one
/// that is not known.
pub(crate) fn strftime(format: &str, now: SystemTime) -> Result<String, String> {
    if format.len() > MAX_FORMAT_BYTES {
        return Err(format!("a date format of {} bytes, but at most {MAX_FORMAT_BYTES} are taken", format.len()));
    }
    let date = Date::new(now);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let mut conversion = letters.next();
        let no_zero = conversion == Some('-');
        if no_zero {
            conversion = letters.next();
        }
        let text = conversion.and_then(|letter| date.conversion(letter));
        let text = text.ok_or_else(|| format!("the date format '{format}' holds an unknown conversion"))?;
        out.push_str(if no_zero { text.trim_start_matches(['0', ' ']) } else { &text });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn strftime_matches_python() {
        // datetime.fromtimestamp(x, UTC).strftime(...)
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S"), "Thursday 01 January 1970 00:00:00");
        assert_eq!(at(951_782_400, "%a %-d %b %y %F"), "Tue 29 Feb 00 2000-02-29");
        assert_eq!(at(1_735_689_599, "%d %b %Y, %I:%M %p, %T%%"), "31 Dec 2024, 11:59 PM, 23:59:59%");
        assert_eq!(at(4_107_542_400, "%F %A"), "2100-03-01 Monday");
    }

    #[test]
    fn unknown_strftime_conversion_is_an_error() {
        assert!(strftime("%Q", UNIX_EPOCH).is_err());
        assert!(strftime("%", UNIX_EPOCH).is_err());
        assert!(strftime(&"x".repeat(300), UNIX_EPOCH).is_err());
    }
}

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
    /// Since midnight.
    seconds: u64,
    microseconds: u32,
    year: u64,
    month: u64,
    day: u64,
}

impl Date {
    fn new(now: SystemTime) -> Self {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let midnight = Self::of_days(since.as_secs() / 86_400);
        Self { seconds: since.as_secs() % 86_400, microseconds: since.subsec_micros(), ..midnight }
    }

    /// Years, months and days of a count of days: Hinnant, "chrono-compatible low-level date
    /// algorithms", `civil_from_days`.
    fn of_days(days: u64) -> Self {
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self { days, seconds: 0, microseconds: 0, year, month, day }
    }

    /// Days since the first of January.
    fn day_of_year(&self) -> u64 {
        let is_leap = self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400));
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][self.month as usize - 1];
        before + u64::from(is_leap && self.month > 2) + self.day - 1
    }

    /// 0 is Sunday.
    fn weekday(&self) -> u64 {
        (self.days + 4) % 7
    }

    /// The year and the week that ISO 8601 counts by: a week begins on Monday, and is in the year
    /// of its Thursday.
    fn iso_week(&self) -> (u64, u64) {
        let thursday = Self::of_days(self.days + 3 - (self.weekday() + 6) % 7);
        (thursday.year, thursday.day_of_year() / 7 + 1)
    }

    fn conversion(&self, letter: char) -> Option<String> {
        let hour = self.seconds / 3600;
        let minute = self.seconds / 60 % 60;
        let second = self.seconds % 60;
        let half = (hour + 11) % 12 + 1;
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[(self.days % 7) as usize];
        let joined = |format: &str| Some(self.text(format));
        Some(match letter {
            'Y' => self.year.to_string(),
            'C' => format!("{:02}", self.year / 100),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year() + 1),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'w' => self.weekday().to_string(),
            'u' => ((self.weekday() + 6) % 7 + 1).to_string(),
            'U' => format!("{:02}", (self.day_of_year() + 7 - self.weekday()) / 7),
            'W' => format!("{:02}", (self.day_of_year() + 7 - (self.weekday() + 6) % 7) / 7),
            'G' => self.iso_week().0.to_string(),
            'g' => format!("{:02}", self.iso_week().0 % 100),
            'V' => format!("{:02}", self.iso_week().1),
            'H' => format!("{hour:02}"),
            'k' => format!("{hour:2}"),
            'I' => format!("{half:02}"),
            'l' => format!("{half:2}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'P' => if hour < 12 { "am" } else { "pm" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => format!("{:06}", self.microseconds),
            's' => (self.days * 86_400 + self.seconds).to_string(),
            'F' => return joined("%Y-%m-%d"),
            'T' | 'X' => return joined("%H:%M:%S"),
            'R' => return joined("%H:%M"),
            'r' => return joined("%I:%M:%S %p"),
            'D' | 'x' => return joined("%m/%d/%y"),
            'c' => return joined("%a %b %e %H:%M:%S %Y"),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            // Python's datetime.now() knows no zone.
            'z' | 'Z' => String::new(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    fn text(&self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            let (text, length) = self.converted(&rest[at..]);
            out.push_str(&text);
            rest = &rest[at + length..];
        }
        out + rest
    }

    /// What a text that begins with `%` stands for, and the length of the conversion. One that is
    /// not known stands for itself.
    fn converted(&self, text: &str) -> (String, usize) {
        let flag = text[1..].chars().next().filter(|flag| "-_0^#EO".contains(*flag));
        let at = 1 + usize::from(flag.is_some());
        let letter = text[at..].chars().next();
        let Some(found) = letter.and_then(|letter| self.conversion(letter)) else { return ("%".to_owned(), 1) };
        let unpadded = found.trim_start_matches(['0', ' ']);
        let unpadded = if unpadded.is_empty() && !found.is_empty() { &found[found.len() - 1..] } else { unpadded };
        let is_number = !unpadded.is_empty() && unpadded.bytes().all(|byte| byte.is_ascii_digit());
        let found = match flag {
            Some('-') if is_number => unpadded.to_owned(),
            Some('_') if is_number => format!("{unpadded:>width$}", width = found.len()),
            Some('0') if is_number => format!("{unpadded:0>width$}", width = found.len()),
            Some('^') => found.to_uppercase(),
            Some('#') if letter == Some('p') => found.to_lowercase(),
            Some('#') => found.to_uppercase(),
            _ => found,
        };
        (found, at + letter.map_or(0, char::len_utf8))
    }
}

/// The date in UTC, by Python's `strftime` on Linux.
pub(crate) fn strftime(format: &str, now: SystemTime) -> Result<String, String> {
    if format.len() > MAX_FORMAT_BYTES {
        return Err(format!("a date format of {} bytes, but at most {MAX_FORMAT_BYTES} are taken", format.len()));
    }
    Ok(Date::new(now).text(format))
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
        const LONG: &str = "%C %j %w %u %U %W %G %g %V %k %l %P %f %s %T %X %R %r %D %x %c|%n%t%z%Z %-j %-H %_m %0e %^a %#p %#A %Ey %Od %Q %-Q é%";
        assert_eq!(
            at(0, LONG),
            "19 001 4 4 00 00 1970 70 01  0 12 am 000000 0 00:00:00 00:00:00 00:00 12:00:00 AM 01/01/70 01/01/70 Thu Jan  1 00:00:00 1970|\n\t 1 0  1 01 THU am THURSDAY 70 01 %Q %-Q é%"
        );
        assert_eq!(
            at(1_735_689_599, LONG),
            "20 366 2 2 52 53 2025 25 01 23 11 pm 000000 1735689599 23:59:59 23:59:59 23:59 11:59:59 PM 12/31/24 12/31/24 Tue Dec 31 23:59:59 2024|\n\t 366 23 12 31 TUE pm TUESDAY 24 31 %Q %-Q é%"
        );
        assert_eq!(
            at(1_770_091_506, LONG),
            "20 034 2 2 05 05 2026 26 06  4  4 am 000000 1770091506 04:05:06 04:05:06 04:05 04:05:06 AM 02/03/26 02/03/26 Tue Feb  3 04:05:06 2026|\n\t 34 4  2 03 TUE am TUESDAY 26 03 %Q %-Q é%"
        );
        assert_eq!(
            at(1_704_067_200, LONG),
            "20 001 1 1 00 01 2024 24 01  0 12 am 000000 1704067200 00:00:00 00:00:00 00:00 12:00:00 AM 01/01/24 01/01/24 Mon Jan  1 00:00:00 2024|\n\t 1 0  1 01 MON am MONDAY 24 01 %Q %-Q é%"
        );
        assert_eq!(
            at(1_798_675_200, LONG),
            "20 365 4 4 52 52 2026 26 53  0 12 am 000000 1798675200 00:00:00 00:00:00 00:00 12:00:00 AM 12/31/26 12/31/26 Thu Dec 31 00:00:00 2026|\n\t 365 0 12 31 THU am THURSDAY 26 31 %Q %-Q é%"
        );
        assert_eq!(
            at(1_609_459_200, LONG),
            "20 001 5 5 00 00 2020 20 53  0 12 am 000000 1609459200 00:00:00 00:00:00 00:00 12:00:00 AM 01/01/21 01/01/21 Fri Jan  1 00:00:00 2021|\n\t 1 0  1 01 FRI am FRIDAY 21 01 %Q %-Q é%"
        );
    }

    #[test]
    fn long_strftime_format_is_an_error() {
        assert!(strftime(&"x".repeat(300), UNIX_EPOCH).is_err());
    }
}

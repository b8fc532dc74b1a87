//! The table for people, and lines of JSON for programs.

use std::io::{self, Write};

use serde_json::json;

use super::Verdict;
use super::definitions::{COMMON, TESTS};
use super::rows::{Row, size_name};

/// What a row came to. Times in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) row: Row,
    pub(crate) value: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
    pub(crate) iters: u64,
    pub(crate) verdict: Verdict,
}

/// What is the same for all rows.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) device: &'static str,
    /// The two cores, or that they are not pinned.
    pub(crate) cores: String,
    pub(crate) pages: String,
    /// The ends share a core.
    pub(crate) yields: bool,
}

/// Writes one form or the other.
pub(crate) struct Report {
    pub(crate) is_json: bool,
    pub(crate) setting: Setting,
}

impl Report {
    /// The head of the table.
    pub(crate) fn begin(&self) -> io::Result<()> {
        if self.is_json {
            return Ok(());
        }
        let head = format!(
            "{:<16} {:>6} {:>10} {:<6}  {:>10} {:>10} {:>10} {:>10}  verified\n",
            "test", "size", "value", "unit", "p50 us", "p99 us", "p99.9 us", "max us"
        );
        print(&head)
    }

    /// A row.
    pub(crate) fn row(&self, figures: &Figures) -> io::Result<()> {
        print(&if self.is_json { json_line(figures, &self.setting) } else { table_line(figures) })
    }

    /// The last lines of the table, with what is to be known of the wire.
    pub(crate) fn end(&self, wire: Option<String>) -> io::Result<()> {
        if self.is_json {
            return Ok(());
        }
        let Setting { device, cores, pages, yields } = &self.setting;
        let shared = if *yields { " (shared by both ends, who yield in place of spinning)" } else { "" };
        let wire = wire.map_or(String::new(), |wire| format!("wire: {wire}\n"));
        print(&format!(
            "{wire}device {device}, cores {cores}{shared}, pages {pages}; us and p50: medians of blocks, one operation, window \
             or batch from push to cqe (lat: half a round trip); p99 to max: single ones; more by --explain\n"
        ))
    }
}

/// A reader that closed the pipe (`| head`) has seen what it wanted: the error says so, and ends the run.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Four digits, and no exponent.
fn digits(x: f64) -> String {
    let before = if x >= 1.0 { x.log10().floor() as usize + 1 } else { 0 };
    format!("{x:.*}", 4usize.saturating_sub(before))
}

fn table_line(figures: &Figures) -> String {
    let Figures { row, value, p50, p99, p999, max, verdict, .. } = figures;
    format!(
        "{:<16} {:>6} {:>10} {:<6}  {:>10} {:>10} {:>10} {:>10}  {}\n",
        row.test.name,
        size_name(row.layout.size),
        digits(*value),
        row.test.unit.name(),
        digits(*p50),
        digits(*p99),
        digits(*p999),
        digits(*max),
        if *verdict == Verdict::Right { "yes" } else { "NO" }
    )
}

fn json_line(figures: &Figures, setting: &Setting) -> String {
    let Figures { row, value, p50, p99, p999, max, iters, verdict } = figures;
    // Times were taken to a nanosecond or three digits.
    let rounded = |x: &f64| (x * 1e6).round() / 1e6;
    let line = json!({
        "test": row.test.name,
        "size": row.layout.size,
        "value": rounded(value),
        "unit": row.test.unit.name(),
        "p50": rounded(p50),
        "p99": rounded(p99),
        "p999": rounded(p999),
        "max": rounded(max),
        "device": setting.device,
        "pages": setting.pages,
        "cores": setting.cores,
        "verified": *verdict == Verdict::Right,
        "iters": iters,
        "batch": row.batch,
        "slots": row.layout.slots,
    });
    format!("{line}\n")
}

/// The definitions of all tests.
pub(crate) fn explain() -> io::Result<()> {
    let mut text = String::new();
    for test in TESTS {
        text.push_str(&format!("{:<16} {:<6}  {}\n", test.name, test.unit.name(), test.definition));
    }
    print(&format!("{text}\n{COMMON}\n"))
}

#[cfg(test)]
mod tests {
    use super::super::{definitions, rows};
    use super::*;

    fn figures() -> Figures {
        let row = rows::plan(&[definitions::parse_test("put_bw").unwrap()], &[4096], None).unwrap()[0];
        let verdict = Verdict::WrongAt(5);
        Figures { row, value: 12.3456789, p50: 0.25, p99: 1.5, p999: 1234.5, max: 123456.7, iters: 9, verdict }
    }

    #[test]
    fn a_line_of_json() {
        let setting = Setting { device: "shm", cores: "0,1".to_string(), pages: "thp".to_string(), yields: false };
        let line = json_line(&figures(), &setting);
        assert!(line.ends_with("}\n") && line.lines().count() == 1);
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        let number = |key: &str| object[key].as_f64().unwrap();
        assert_eq!((number("size"), number("value"), number("batch"), number("iters")), (4096.0, 12.345679, 64.0, 9.0));
        assert_eq!((number("p50"), number("p99"), number("p999"), number("max")), (0.25, 1.5, 1234.5, 123456.7));
        assert_eq!(
            (object["test"].as_str(), object["unit"].as_str(), object["device"].as_str(), object["pages"].as_str()),
            (Some("put_bw"), Some("GB/s"), Some("shm"), Some("thp"))
        );
        assert_eq!((object["verified"].as_bool(), object["cores"].as_str()), (Some(false), Some("0,1")));
    }

    #[test]
    fn a_line_of_the_table() {
        let line = table_line(&figures());
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["put_bw", "4k", "12.35", "GB/s", "0.2500", "1.500", "1234", "123457", "NO"]);
    }

    #[test]
    fn numbers_have_four_digits() {
        for (x, text) in [(0.0, "0.0000"), (0.01234, "0.0123"), (1.0, "1.000"), (12.346, "12.35"), (99999.6, "100000")]
        {
            assert_eq!(digits(x), text);
        }
    }
}

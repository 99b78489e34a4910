//! The runs as one page that needs nothing from elsewhere.

mod chart;
mod comparison;
mod escape;
mod figures;
mod scale;

use super::args::SimulateArgs;
use super::plan::Varied;
use super::report;
use super::runs::Run;
use super::workload::Workload;
use chart::Chart;
use escape::escape;

const STYLE: &str = include_str!("page.css");

/// The page.
pub(crate) fn page(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> String {
    let title = escape(&format!("{} simulated", workload.name));
    let groups: String = groups(runs).iter().map(|group| section(args, workload, group)).collect();
    let (head, footer) = (head(args, workload, runs), footer(runs));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <header><h1>{title}</h1>\n{head}</header>\n{groups}{footer}</main>\n</body>\n</html>\n"
    )
}

fn head(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> String {
    let Some(first) = runs.first() else { return String::new() };
    let head = definitions("facts", &report::shared_head(workload, args.counted().as_str(), &first.setting));
    let warning = workload.warning().map(|text| format!("<p class=\"warning\">{}</p>\n", escape(&text)));
    head + &warning.unwrap_or_default()
}

/// Names and values.
fn definitions(class: &str, rows: &[(&str, String)]) -> String {
    let row = |(name, value): &(&str, String)| {
        let (name, value) = (escape(name), escape(value));
        format!("<div><dt>{name}</dt><dd>{value}</dd></div>")
    };
    format!("<dl class=\"{class}\">{}</dl>\n", rows.iter().map(row).collect::<String>())
}

/// What the columns of the tables are, where there are tables.
fn footer(runs: &[Run]) -> String {
    match runs {
        [_] => String::new(),
        _ => format!("<footer><h2>Columns</h2>{}</footer>\n", comparison::meanings()),
    }
}

/// Runs of which the same kind of policy is varied.
fn groups(runs: &[Run]) -> Vec<Vec<&Run>> {
    runs.chunk_by(|one, next| one.setting.varied == next.setting.varied).map(|group| group.iter().collect()).collect()
}

/// Runs of one policy, speeds ascending.
fn policies<'a>(group: &[&'a Run]) -> Vec<Vec<&'a Run>> {
    group.chunk_by(|one, next| one.setting.name() == next.setting.name()).map(<[_]>::to_vec).collect()
}

fn section(args: &SimulateArgs, workload: &Workload, group: &[&Run]) -> String {
    let Some(first) = group.first() else { return String::new() };
    let (policies, compared) = (policies(group), args.compare.is_some());
    let heading = match (compared, first.setting.varied) {
        (false, _) => "What became of the requests",
        (true, Varied::Placement) => "Placement policies compared",
        (true, Varied::Admission) => "Admission policies compared",
        (true, Varied::Eviction) => "Eviction policies compared",
    };
    let (given, charts) = (escape(&given(args, first)), charts(args, &policies));
    let body = match (&args.curve, compared) {
        (Some(_), _) => {
            format!("{charts}<details><summary>All figures</summary>{}</details>\n", comparison::table(group))
        }
        (None, true) => comparison::table(group) + &charts,
        (None, false) => definitions("card", &report::figures(workload, first)) + &charts,
    };
    format!("<section><h2>{heading}</h2><p>{given}</p>\n{body}</section>\n")
}

/// What all runs of a group have in common.
fn given(args: &SimulateArgs, run: &Run) -> String {
    let (options, varied) = (&run.setting.options, run.setting.varied);
    let policies = [
        (Varied::Placement, options.placement.as_str()),
        (Varied::Admission, options.admission.as_str()),
        (Varied::Eviction, run.setting.options.eviction.as_str()),
    ];
    let same = policies.into_iter().filter(|(kind, _)| args.compare.is_none() || *kind != varied);
    let same: Vec<_> = same.map(|(kind, name)| format!("{} {name}", kind.as_str())).collect();
    let speed =
        if args.curve.is_some() { String::new() } else { format!(", at {}x the recorded speed", options.speed) };
    format!("With {}{speed}.", same.join(", "))
}

/// The charts of a group: over the speed, where that varies, and of the highest speed.
fn charts(args: &SimulateArgs, policies: &[Vec<&Run>]) -> String {
    let fastest: Vec<_> = policies.iter().filter_map(|runs| runs.last().copied()).collect();
    let of_requests = [figures::ttft(&fastest), figures::tbt(&fastest)];
    let of_nodes = [figures::prefill_load(&fastest), figures::decode_load(&fastest)];
    let single = grid(&of_requests) + &grid(&of_nodes);
    let (Some(_), Some(last)) = (&args.curve, fastest.last()) else { return single };
    let curves = grid(&[figures::ttft_curve(policies), figures::slo_curve(policies)]);
    format!("{curves}<h3>At {}x</h3>\n{single}", last.setting.options.speed)
}

fn grid(charts: &[Chart]) -> String {
    format!("<div class=\"charts\">\n{}</div>\n", charts.iter().map(Chart::figure).collect::<String>())
}

#[cfg(test)]
mod tests {
    use crate::policy::{SimAdmission, SimPlacement};

    use super::super::args::tests::parse;
    use super::super::fixture::trace_file;
    use super::super::plan::settings;
    use super::super::runs::run_all;
    use super::*;

    /// The page of a trace whose name would be an element.
    fn page_of(rest: &str) -> String {
        let trace = trace_file(40, |n| n * 700);
        let args = parse(&format!("--trace {} {rest}", trace.path().display())).unwrap();
        let workload = Workload { name: "<img src=x>.jsonl".to_owned(), ..Workload::load(&args).unwrap() };
        let runs = run_all(&workload, &settings(&args), false);
        page(&args, &workload, &runs)
    }

    #[test]
    fn every_policy_is_named_and_no_text_is_markup() {
        let page = page_of("--compare all");
        let placements = SimPlacement::ALL.map(SimPlacement::as_str);
        for name in placements.into_iter().chain(SimAdmission::ALL.map(SimAdmission::as_str)) {
            assert!(page.contains(&format!(">{name}</li>")) && page.contains(&format!("<th>{name}</th>")), "{name}");
        }
        assert!(!page.contains("<img") && page.contains("&lt;img src=x&gt;.jsonl simulated"));
    }

    #[test]
    fn a_page_needs_nothing_from_elsewhere() {
        let page = page_of("");
        for part in ["http", "<script", "<link", "url(", "@import"] {
            assert!(!page.contains(part), "{part}");
        }
        assert_eq!(page.matches("<svg").count(), 4, "two distributions, two loads");
    }

    #[test]
    fn curves_come_first() {
        let page = page_of("--compare placement --curve 1:2:1");
        assert_eq!(page.matches("<svg").count(), 6);
        assert!(page.find("over the speed").unwrap() < page.find("<h3>At 2x</h3>").unwrap());
    }
}

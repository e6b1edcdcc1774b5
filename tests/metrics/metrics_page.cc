#include "tests/metrics/metrics_page.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <vector>

#include "coordinator/metrics/metrics.h"
#include "peerd/daemon/totals.h"
#include "peerd/metrics/peer_metrics.h"

namespace longhaul {
namespace {

constexpr size_t kColumns = 120;

constexpr char kHead[] =
    R"(# Metrics
Read this page if you watch Longhaul with Prometheus, or write a rule or a dashboard. Afterwards you know all metrics of
both daemons. The code makes this page: after a change, run

    bazel run //tests/metrics:print_metrics_page >docs/metrics.md

Both daemons serve `/metrics` at `--http`. Counters begin with 0 at the start of a daemon. A label either has the values
that are listed here, and all its series exist from the start; or the page shows a limited number of series: 64 groups,
the 8 slowest links of rings, the 4 slowest links of a peer. Histograms have the usual series `_bucket`, `_sum` and
`_count`.

To find the cause of a slow step, compare the phases of `longhaul_peerd_op_phase_seconds`. *wait* grows if another host
starts its ops late: it computes longer, or it stands still. *transfer* grows if a link is slow. *commit* grows if the
answers of other peers come late, or if there is much to copy. The alerts in `deploy/prometheus/rules.yml` are explained
in the [runbook](runbook.md).
)";

// Labels whose values depend on who takes part.
const std::set<std::string>& OpenLabels() {
  static const auto& labels = *new std::set<std::string>{
      "run", "group", "peer", "from", "from_host", "to", "to_host", "version"};
  return labels;
}

struct Metric {
  std::string help;
  std::string type;
  std::map<std::string, std::set<std::string>> labels;  // with their values
};

void AddLabels(const std::string& series, std::map<std::string, std::set<std::string>>* labels) {
  for (size_t at = series.find('{'); at != std::string::npos && at < series.size();) {
    const size_t equals = series.find("=\"", at + 1);
    if (equals == std::string::npos) return;
    const std::string label = series.substr(at + 1, equals - at - 1);
    at = series.find('"', equals + 2);
    if (at == std::string::npos) return;
    if (label != "le") (*labels)[label].insert(series.substr(equals + 2, at - equals - 2));
    at = series.find("\",", at);
    if (at == std::string::npos) return;
    ++at;
  }
}

// The metrics on a page in Prometheus' text format, by name.
std::map<std::string, Metric> Parse(const std::string& page) {
  std::map<std::string, Metric> metrics;
  std::istringstream lines(page);
  std::string current;
  for (std::string line; std::getline(lines, line);) {
    const bool help = line.starts_with("# HELP ");
    if (help || line.starts_with("# TYPE ")) {
      const size_t end = line.find(' ', 7);
      current = line.substr(7, end - 7);
      (help ? metrics[current].help : metrics[current].type) = line.substr(end + 1);
    } else {
      AddLabels(line, &metrics[current].labels);
    }
  }
  return metrics;
}

// A paragraph of lines that are not too long; lines behind the first one are indented.
std::string Wrap(const std::string& text) {
  std::istringstream words(text);
  std::string result;
  std::string line;
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + 1 + word.size() > kColumns) {
      result += line + "\n";
      line = " ";
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return result + line + "\n";
}

std::string Section(const std::string& title, const std::string& page) {
  std::string result = "\n## " + title + "\n";
  for (const auto& [name, metric] : Parse(page)) {
    std::string labels;
    for (const auto& [label, values] : metric.labels) {
      labels += (labels.empty() ? ", by `" : "; by `") + label + "`";
      if (OpenLabels().contains(label)) continue;
      std::string list;
      for (const std::string& value : values) list += (list.empty() ? "" : ", ") + value;
      labels += ": " + list;
    }
    result += Wrap("- `" + name + "` (" + metric.type + labels + "): " + metric.help + ".");
  }
  return result;
}

// A fresh registry, with one group and one link: series of groups and links exist only while there
// are groups and links.
std::string CoordinatorPage() {
  coordinator::CoordinatorMetrics metrics;
  coordinator::GroupView group;
  group.group = {"demo", 0};
  group.ring.resize(2);
  group.ring[0].peer = PeerId(1);
  group.ring[0].next = coordinator::LinkView{1, 1};
  group.ring[1].peer = PeerId(2);
  coordinator::Overview overview;
  overview.groups.push_back(group);
  metrics.SetOverview(overview);
  return metrics.Text();
}

std::string PeerPage() {
  peerd::PeerMetrics metrics([] {});
  peerd::PeerSnapshot snapshot;
  snapshot.totals = peerd::Totals({});
  snapshot.links.push_back({PeerId(1), 1, 1, 0});
  metrics.Publish(snapshot);
  return metrics.Text(std::chrono::milliseconds(0));
}

}  // namespace

std::string MetricsPage() {
  return kHead + Section("longhaul-coordinator", CoordinatorPage()) +
         Section("longhaul-peerd", PeerPage());
}

}  // namespace longhaul

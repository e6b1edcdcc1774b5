// The file is readable with the sqlite3 tool while the coordinator runs. Ids are written as in logs
// ("p1f", "m3"), the order of members is `rank`, that of the ring `position`.
//
// Write-ahead log with synchronous=FULL: a transaction is on disk when COMMIT returns, since the
// log is flushed (fsync) before. A crash of the process or of the machine therefore loses no
// reported transaction and tears none; a disk that lies about flushing may lose the last ones,
// which peers then show to be missing (Group::Attach). Only what a mutation changes of a group is
// written: most change one table of five.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "coordinator/store/files.h"
#include "coordinator/store/store.h"
#include "sqlite3.h"

namespace longhaul::coordinator {
namespace {

constexpr int kApplicationId = 0x4c48434f;  // "LHCO"
constexpr int kSchemaVersion = 5;
constexpr int kBusyTimeoutMs = 5000;

constexpr char kSchema[] = R"(
CREATE TABLE store(store INTEGER NOT NULL, term INTEGER NOT NULL);
CREATE TABLE drains(peer TEXT NOT NULL PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE runs(
  run TEXT NOT NULL PRIMARY KEY, next_member INTEGER NOT NULL, secret BLOB NOT NULL);
CREATE TABLE groups(
  run TEXT NOT NULL, grp INTEGER NOT NULL, committed INTEGER NOT NULL, highest INTEGER NOT NULL,
  boundary INTEGER NOT NULL, attempt INTEGER NOT NULL, ballots INTEGER NOT NULL,
  revision INTEGER NOT NULL, state TEXT NOT NULL, manifest TEXT NOT NULL, PRIMARY KEY(run, grp));
CREATE TABLE members(
  run TEXT NOT NULL, grp INTEGER NOT NULL, rank INTEGER NOT NULL, member TEXT NOT NULL,
  peer TEXT NOT NULL, request INTEGER NOT NULL, name TEXT NOT NULL, joined INTEGER NOT NULL,
  votes INTEGER NOT NULL, syncs INTEGER NOT NULL, cohort TEXT NOT NULL, cohort_size INTEGER NOT NULL,
  after INTEGER NOT NULL, step_deadline_ms INTEGER NOT NULL, counts INTEGER NOT NULL,
  departs TEXT NOT NULL,
  reason TEXT NOT NULL, PRIMARY KEY(run, grp, rank));
CREATE TABLE ring(
  run TEXT NOT NULL, grp INTEGER NOT NULL, position INTEGER NOT NULL, peer TEXT NOT NULL,
  endpoints TEXT NOT NULL, lanes INTEGER NOT NULL, host TEXT NOT NULL,
  PRIMARY KEY(run, grp, position));
CREATE TABLE fates(
  run TEXT NOT NULL, grp INTEGER NOT NULL, place INTEGER NOT NULL, peer TEXT NOT NULL,
  ops TEXT NOT NULL, PRIMARY KEY(run, grp, place));
CREATE TABLE blocked(
  run TEXT NOT NULL, grp INTEGER NOT NULL, place INTEGER NOT NULL, a TEXT NOT NULL,
  b TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY(run, grp, place));
)";

// ------------------------------------------------------------------------------ text columns

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"%", "%25"}, {",", "%2c"}});
}
std::string Unescape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"%25", "%"}, {"%2c", ","}});
}

// "a:1,b:2"; "" is the empty list, so an empty endpoint among others is written as "%00".
std::string JoinEndpoints(const std::vector<std::string>& endpoints) {
  return absl::StrJoin(endpoints, ",", [](std::string* out, const std::string& endpoint) {
    absl::StrAppend(out, endpoint.empty() ? "%00" : Escape(endpoint));
  });
}
std::vector<std::string> SplitEndpoints(const std::string& text) {
  std::vector<std::string> endpoints;
  if (text.empty()) return endpoints;
  const std::vector<std::string> pieces = absl::StrSplit(text, ',');
  for (const std::string& piece : pieces) {
    endpoints.push_back(piece == "%00" ? "" : Unescape(piece));
  }
  return endpoints;
}

constexpr std::pair<control::Fate, const char*> kFateNames[] = {
    {control::Fate::kCommit, "commit"},
    {control::Fate::kRedo, "redo"},
    {control::Fate::kAbort, "abort"},
};

constexpr std::pair<control::Removal, const char*> kRemovalNames[] = {
    {control::Removal::kLeft, "left"},       {control::Removal::kDied, "died"},
    {control::Removal::kEvicted, "evicted"}, {control::Removal::kUnreachable, "unreachable"},
    {control::Removal::kUnknown, "unknown"},
};

// "": the member stays.
std::string RemovalName(const MemberRecord& member) {
  for (const auto& [value, name] : kRemovalNames) {
    if (member.departs && member.departs->why == value) return name;
  }
  return "";
}
bool SetRemoval(const std::string& name, const std::string& reason, MemberRecord* member) {
  if (name.empty()) return reason.empty();
  for (const auto& [value, known] : kRemovalNames) {
    if (name == known) member->departs = Departure{value, reason};
  }
  return member->departs.has_value();
}

// "o3=commit o4=redo e20/7=missed": ops by ordinal, missed ones by boundary and tag.
std::string JoinFates(const FatesRecord& record) {
  std::vector<std::string> pieces;
  for (const control::OpFate& fate : record.fates) {
    for (const auto& [value, name] : kFateNames) {
      if (value == fate.fate) pieces.push_back(absl::StrCat(ToString(fate.ordinal), "=", name));
    }
  }
  for (const control::MissedOp& op : record.missed) {
    pieces.push_back(absl::StrCat("e", op.boundary.value(), "/", op.tag, "=missed"));
  }
  return absl::StrJoin(pieces, " ");
}
bool SplitMissed(const std::string& text, FatesRecord* record) {
  const size_t slash = text.find('/');
  uint64_t boundary = 0;
  uint64_t tag = 0;
  if (slash == std::string::npos || !absl::SimpleAtoi(text.substr(0, slash), &boundary) ||
      !absl::SimpleAtoi(text.substr(slash + 1), &tag)) {
    return false;
  }
  record->missed.push_back({Epoch(boundary), tag});
  return true;
}
bool SplitFate(const std::string& text, const std::string& fate, FatesRecord* record) {
  uint64_t ordinal = 0;
  if (!absl::SimpleAtoi(text, &ordinal)) return false;
  for (const auto& [value, name] : kFateNames) {
    if (fate != name) continue;
    record->fates.push_back({OpOrdinal(ordinal), value});
    return true;
  }
  return false;
}
bool SplitFates(const std::string& text, FatesRecord* record) {
  if (text.empty()) return true;
  const std::vector<std::string> pieces = absl::StrSplit(text, ' ');
  return std::all_of(pieces.begin(), pieces.end(), [&](const std::string& piece) {
    const size_t equals = piece.find('=');
    if (equals == std::string::npos || equals == 0) return false;
    const std::string name = piece.substr(1, equals - 1);
    const std::string fate = piece.substr(equals + 1);
    if (piece[0] == 'e' && fate == "missed") return SplitMissed(name, record);
    return piece[0] == 'o' && SplitFate(name, fate, record);
  });
}

// ------------------------------------------------------------------------------ SQLite

// A prepared statement between Reset and the next Reset. Binds and reads columns in order.
class Statement {
 public:
  explicit Statement(sqlite3_stmt* statement) : statement_(statement) {}
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;
  ~Statement() {
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
  }

  Statement& Text(const std::string& text) {
    sqlite3_bind_text(statement_, ++bound_, text.data(), static_cast<int>(text.size()),
                      SQLITE_TRANSIENT);
    return *this;
  }
  Statement& Blob(const std::string& bytes) {
    // A null pointer would bind NULL.
    sqlite3_bind_blob(statement_, ++bound_, bytes.empty() ? "" : bytes.data(),
                      static_cast<int>(bytes.size()), SQLITE_TRANSIENT);
    return *this;
  }
  // Numbers of 64 bits keep their bits; SQLite shows the upper half as negative.
  Statement& Int(uint64_t value) {
    sqlite3_bind_int64(statement_, ++bound_, static_cast<sqlite3_int64>(value));
    return *this;
  }

  int Step() {
    column_ = 0;
    return sqlite3_step(statement_);
  }

  std::string TakeText() {
    const void* data = sqlite3_column_blob(statement_, column_);
    const int size = sqlite3_column_bytes(statement_, column_++);
    return data == nullptr ? "" : std::string(static_cast<const char*>(data), size);
  }
  uint64_t TakeInt() { return static_cast<uint64_t>(sqlite3_column_int64(statement_, column_++)); }
  GroupKey TakeGroup() {
    GroupKey group;
    group.run = TakeText();
    group.group = static_cast<uint32_t>(TakeInt());
    return group;
  }
  // "p1f", "m3"; 0 and `*bad` if it is not written so.
  PeerId TakePeer(bool* bad) { return PeerId(TakeId('p', 16, bad)); }
  MemberId TakeMember(bool* bad) { return MemberId(TakeId('m', 10, bad)); }

 private:
  uint64_t TakeId(char letter, int base, bool* bad) {
    const std::string text = TakeText();
    errno = 0;
    char* end = nullptr;
    const uint64_t value = text.size() > 1 && isalnum(static_cast<unsigned char>(text[1]))
                               ? strtoull(text.c_str() + 1, &end, base)
                               : 0;
    *bad |= text.empty() || text[0] != letter || errno != 0 || end == nullptr || *end != '\0';
    return value;
  }

  sqlite3_stmt* const statement_;
  int bound_ = 0;
  int column_ = 0;
};

class SqliteStore final : public Store {
 public:
  SqliteStore(std::string path, Fd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  ~SqliteStore() override {
    for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
    sqlite3_close(db_);
  }

  absl::Status Open();
  absl::StatusOr<Records> Load() override;
  absl::Status Apply(const std::vector<Mutation>& mutations) override;
  std::string Name() const override { return absl::StrCat("sqlite:", path_); }

 private:
  // What went wrong with the database, with SQLite's words for it.
  absl::Status Error(const std::string& what) const;
  absl::Status Corrupt(const std::string& what) const {
    return absl::DataLossError(absl::StrCat("store ", path_, " is corrupt: ", what,
                                            "; restore a copy, or move the file away: then all "
                                            "members have to join again"));
  }

  absl::Status Execute(const char* sql);
  absl::StatusOr<std::string> Pragma(const char* sql);
  absl::StatusOr<sqlite3_stmt*> Prepare(const char* sql);
  // Runs a statement that gives no rows.
  absl::Status Run(Statement& statement);

  absl::Status CheckFormat();
  absl::Status Configure();

  absl::Status LoadStore(Records* records);
  absl::Status LoadDrains(Records* records);
  absl::Status LoadRuns(Records* records);
  absl::Status LoadGroups(Records* records);
  absl::Status LoadMembers(Records* records);
  absl::Status LoadRing(Records* records);
  absl::Status LoadFates(Records* records);
  absl::Status LoadBlocked(Records* records);
  // `row` reads one row and returns what is wrong with it, "" if nothing.
  template <class Row>
  absl::Status ForEach(const char* sql, Row row);

  absl::Status Write(const Mutation& mutation);
  absl::Status Write(const PutStore& put);
  absl::Status Write(const PutDrain& put);
  absl::Status Write(const DeleteDrain& gone);
  absl::Status Write(const PutRun& put);
  absl::Status Write(const DeleteRun& gone);
  absl::Status Write(const PutGroup& put);
  absl::Status Write(const DeleteGroup& gone);
  absl::Status DeleteOf(const char* sql, const GroupKey& group);
  absl::Status WriteMembers(const GroupRecord& record);
  absl::Status WriteRing(const GroupRecord& record);
  absl::Status WriteFates(const GroupRecord& record);
  absl::Status WriteBlocked(const GroupRecord& record);

  const std::string path_;
  const Fd lock_;
  sqlite3* db_ = nullptr;
  std::map<const char*, sqlite3_stmt*> statements_;  // by the address of its SQL literal
  Records records_;                                  // what the file holds
  absl::Status broken_;                              // the first failed Apply()
};

absl::Status SqliteStore::Error(const std::string& what) const {
  const int code = sqlite3_errcode(db_) & 0xff;
  const std::string seen = absl::StrCat("store ", path_, ": ", what, ": ", sqlite3_errmsg(db_));
  if (code == SQLITE_CORRUPT) return Corrupt(sqlite3_errmsg(db_));
  if (code == SQLITE_NOTADB) {
    return absl::FailedPreconditionError(
        absl::StrCat(seen, "; --store must name a file that a coordinator made, or a new one"));
  }
  if (code == SQLITE_BUSY || code == SQLITE_LOCKED) {
    return absl::UnavailableError(
        absl::StrCat(seen, "; another program has a transaction open on the file, end it"));
  }
  if (code == SQLITE_FULL) return absl::UnavailableError(absl::StrCat(seen, "; make room"));
  return absl::UnavailableError(seen);
}

absl::Status SqliteStore::Execute(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) == SQLITE_OK) return absl::OkStatus();
  return Error(absl::StrCat("cannot execute '", std::string(sql).substr(0, 40), "'"));
}

absl::StatusOr<sqlite3_stmt*> SqliteStore::Prepare(const char* sql) {
  sqlite3_stmt*& statement = statements_[sql];
  if (statement == nullptr && sqlite3_prepare_v2(db_, sql, -1, &statement, nullptr) != SQLITE_OK) {
    return Error("cannot prepare a statement");
  }
  return statement;
}

absl::Status SqliteStore::Run(Statement& statement) {
  if (statement.Step() == SQLITE_DONE) return absl::OkStatus();
  return Error("cannot write");
}

absl::StatusOr<std::string> SqliteStore::Pragma(const char* sql) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare(sql));
  Statement statement(prepared);
  const int step = statement.Step();
  if (step == SQLITE_ROW) return statement.TakeText();
  if (step == SQLITE_DONE) return std::string();
  return Error(sql);
}

// ------------------------------------------------------------------------------ opening

absl::Status SqliteStore::Open() {
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
  if (sqlite3_open_v2(path_.c_str(), &db_, flags, nullptr) != SQLITE_OK) {
    return Error("cannot open");
  }
  sqlite3_extended_result_codes(db_, 1);
  sqlite3_busy_timeout(db_, kBusyTimeoutMs);
  LH_RETURN_IF_ERROR(CheckFormat());
  LH_RETURN_IF_ERROR(Configure());
  absl::StatusOr<Records> records = Load();
  if (!records.ok()) return records.status();
  records_ = *std::move(records);
  return absl::OkStatus();
}

// Refuses before anything is written.
absl::Status SqliteStore::CheckFormat() {
  LH_ASSIGN_OR_RETURN(const std::string tables, Pragma("SELECT count(*) FROM sqlite_master"));
  LH_ASSIGN_OR_RETURN(const std::string application, Pragma("PRAGMA application_id"));
  LH_ASSIGN_OR_RETURN(const std::string version, Pragma("PRAGMA user_version"));
  if (application != std::to_string(kApplicationId)) {
    if (tables == "0" && application == "0") return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("store ", path_, " is the SQLite file of another program; choose another"));
  }
  int number = 0;
  if (!absl::SimpleAtoi(version, &number) || number < 1) return Corrupt("it has no version");
  if (number > kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("store ", path_, " was written by a newer coordinator: its schema is ", number,
                     ", this version knows up to ", kSchemaVersion, "; run the newer one"));
  }
  if (number < kSchemaVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "store ", path_, " was written by an older coordinator: its schema is ", number,
        ", this version writes ", kSchemaVersion,
        "; end the runs with the older one, or move the file away: then all members have to join "
        "again"));
  }
  LH_ASSIGN_OR_RETURN(const std::string check, Pragma("PRAGMA quick_check(1)"));
  if (check != "ok") return Corrupt(check);
  return absl::OkStatus();
}

absl::Status SqliteStore::Configure() {
  LH_ASSIGN_OR_RETURN(const std::string mode, Pragma("PRAGMA journal_mode=WAL"));
  if (mode != "wal") {
    return absl::FailedPreconditionError(
        absl::StrCat("store ", path_, ": its file system has no write-ahead log (mode is ", mode,
                     "); choose a local disk"));
  }
  LH_RETURN_IF_ERROR(Execute("PRAGMA synchronous=FULL"));
  LH_ASSIGN_OR_RETURN(const std::string version, Pragma("PRAGMA user_version"));
  if (version != "0") return absl::OkStatus();
  return Execute(absl::StrCat("BEGIN IMMEDIATE;", kSchema, "PRAGMA application_id=", kApplicationId,
                              ";PRAGMA user_version=", kSchemaVersion, ";COMMIT")
                     .c_str());
}

// ------------------------------------------------------------------------------ reading

template <class Row>
absl::Status SqliteStore::ForEach(const char* sql, Row row) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare(sql));
  Statement statement(prepared);
  int step = 0;
  while ((step = statement.Step()) == SQLITE_ROW) {
    if (const std::string wrong = row(statement); !wrong.empty()) return Corrupt(wrong);
  }
  return step == SQLITE_DONE ? absl::OkStatus() : Error("cannot read");
}

absl::Status SqliteStore::LoadStore(Records* records) {
  return ForEach("SELECT store, term FROM store", [&](Statement& row) -> std::string {
    if (records->store.store != 0) return "it has two names";
    records->store.store = row.TakeInt();
    records->store.term = row.TakeInt();
    return records->store.store == 0 ? "its name is 0" : "";
  });
}

absl::Status SqliteStore::LoadDrains(Records* records) {
  return ForEach("SELECT peer, reason FROM drains", [&](Statement& row) -> std::string {
    bool bad = false;
    const PeerId peer = row.TakePeer(&bad);
    records->drains.emplace(peer, row.TakeText());
    return bad ? "bad row in table drains" : "";
  });
}

absl::Status SqliteStore::LoadRuns(Records* records) {
  return ForEach("SELECT run, next_member, secret FROM runs", [&](Statement& row) -> std::string {
    RunRecord record;
    record.run = row.TakeText();
    record.next_member = row.TakeInt();
    record.secret = row.TakeText();
    if (record.secret.size() != kSecretBytes) {
      return absl::StrCat("the secret of run ", record.run, " has ", record.secret.size(),
                          " bytes instead of ", kSecretBytes);
    }
    records->runs.emplace(record.run, record);
    return "";
  });
}

absl::Status SqliteStore::LoadGroups(Records* records) {
  return ForEach(
      "SELECT run, grp, committed, highest, boundary, attempt, ballots, revision, state, manifest "
      "FROM groups",
      [&](Statement& row) -> std::string {
        GroupRecord record;
        record.group = row.TakeGroup();
        record.committed = Epoch(row.TakeInt());
        record.highest = Epoch(row.TakeInt());
        record.boundary = Epoch(row.TakeInt());
        record.attempt = Epoch(row.TakeInt());
        record.ballots = row.TakeInt();
        StateRecord state;
        state.revision = row.TakeInt();
        const std::string root = row.TakeText();
        const std::string manifest = row.TakeText();
        if (!root.empty()) {
          if (!ParseHash128(root, &state.state) || !ParseHash128(manifest, &state.manifest)) {
            return absl::StrCat("bad state of group ", ToString(record.group));
          }
          record.state = state;
        }
        if (records->runs.count(record.group.run) == 0) {
          return absl::StrCat("group ", ToString(record.group), " is of no run");
        }
        records->groups.emplace(record.group, record);
        return "";
      });
}

absl::Status SqliteStore::LoadMembers(Records* records) {
  return ForEach(
      "SELECT run, grp, member, peer, request, name, joined, votes, syncs, cohort, cohort_size, "
      "after, step_deadline_ms, counts, departs, reason FROM members "
      "ORDER BY run, grp, rank",
      [&](Statement& row) -> std::string {
        const GroupKey group = row.TakeGroup();
        bool bad = false;
        MemberRecord record;
        record.member = row.TakeMember(&bad);
        record.peer = row.TakePeer(&bad);
        record.request = row.TakeInt();
        record.name = row.TakeText();
        record.joined = Epoch(row.TakeInt());
        record.votes = row.TakeInt();
        record.syncs = row.TakeInt();
        record.cohort = row.TakeText();
        record.cohort_size = static_cast<uint32_t>(row.TakeInt());
        record.after = row.TakeInt();
        record.step_deadline_ms = static_cast<uint32_t>(row.TakeInt());
        record.counts = Epoch(row.TakeInt());
        const std::string departs = row.TakeText();
        bad |= !SetRemoval(departs, row.TakeText(), &record);
        const auto it = records->groups.find(group);
        if (bad || it == records->groups.end()) {
          return absl::StrCat("bad row in table members of group ", ToString(group));
        }
        it->second.members.push_back(std::move(record));
        return "";
      });
}

absl::Status SqliteStore::LoadRing(Records* records) {
  return ForEach(
      "SELECT run, grp, peer, endpoints, lanes, host FROM ring "
      "ORDER BY run, grp, position",
      [&](Statement& row) -> std::string {
        const GroupKey group = row.TakeGroup();
        bool bad = false;
        PeerRecord record;
        record.peer = row.TakePeer(&bad);
        record.endpoints = SplitEndpoints(row.TakeText());
        record.lanes = static_cast<uint32_t>(row.TakeInt());
        record.host = row.TakeText();
        const auto it = records->groups.find(group);
        if (bad || it == records->groups.end()) {
          return absl::StrCat("bad row in table ring of group ", ToString(group));
        }
        it->second.peers.push_back(std::move(record));
        return "";
      });
}

absl::Status SqliteStore::LoadFates(Records* records) {
  return ForEach("SELECT run, grp, peer, ops FROM fates ORDER BY run, grp, place",
                 [&](Statement& row) -> std::string {
                   const GroupKey group = row.TakeGroup();
                   bool bad = false;
                   FatesRecord record;
                   record.peer = row.TakePeer(&bad);
                   bad |= !SplitFates(row.TakeText(), &record);
                   const auto it = records->groups.find(group);
                   if (bad || it == records->groups.end()) {
                     return absl::StrCat("bad row in table fates of group ", ToString(group));
                   }
                   it->second.fates.push_back(std::move(record));
                   return "";
                 });
}

absl::Status SqliteStore::LoadBlocked(Records* records) {
  return ForEach("SELECT run, grp, a, b, reason FROM blocked ORDER BY run, grp, place",
                 [&](Statement& row) -> std::string {
                   const GroupKey group = row.TakeGroup();
                   bool bad = false;
                   BlockedRecord record;
                   record.pair.a = row.TakePeer(&bad);
                   record.pair.b = row.TakePeer(&bad);
                   record.reason = row.TakeText();
                   const auto it = records->groups.find(group);
                   if (bad || it == records->groups.end()) {
                     return absl::StrCat("bad row in table blocked of group ", ToString(group));
                   }
                   it->second.blocked.push_back(std::move(record));
                   return "";
                 });
}

absl::StatusOr<Records> SqliteStore::Load() {
  Records records;
  LH_RETURN_IF_ERROR(LoadStore(&records));
  LH_RETURN_IF_ERROR(LoadDrains(&records));
  LH_RETURN_IF_ERROR(LoadRuns(&records));
  LH_RETURN_IF_ERROR(LoadGroups(&records));
  LH_RETURN_IF_ERROR(LoadMembers(&records));
  LH_RETURN_IF_ERROR(LoadRing(&records));
  LH_RETURN_IF_ERROR(LoadFates(&records));
  LH_RETURN_IF_ERROR(LoadBlocked(&records));
  return records;
}

// ------------------------------------------------------------------------------ writing

absl::Status SqliteStore::Apply(const std::vector<Mutation>& mutations) {
  if (!broken_.ok()) return broken_;
  broken_ = Execute("BEGIN IMMEDIATE");
  for (size_t i = 0; broken_.ok() && i < mutations.size(); ++i) broken_ = Write(mutations[i]);
  if (broken_.ok()) broken_ = Execute("COMMIT");
  if (!broken_.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  return broken_;
}

absl::Status SqliteStore::Write(const Mutation& mutation) {
  LH_RETURN_IF_ERROR(std::visit([this](const auto& m) { return Write(m); }, mutation));
  coordinator::Apply(mutation, &records_);
  return absl::OkStatus();
}

absl::Status SqliteStore::Write(const PutStore& put) {
  {
    LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare("DELETE FROM store"));
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement));
  }
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("INSERT INTO store(store, term) VALUES(?, ?)"));
  Statement statement(prepared);
  return Run(statement.Int(put.record.store).Int(put.record.term));
}

absl::Status SqliteStore::Write(const PutDrain& put) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("INSERT OR REPLACE INTO drains(peer, reason) VALUES(?, ?)"));
  Statement statement(prepared);
  return Run(statement.Text(ToString(put.peer)).Text(put.reason));
}

absl::Status SqliteStore::Write(const DeleteDrain& gone) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare("DELETE FROM drains WHERE peer=?"));
  Statement statement(prepared);
  return Run(statement.Text(ToString(gone.peer)));
}

absl::Status SqliteStore::Write(const PutRun& put) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("INSERT OR REPLACE INTO runs(run, next_member, secret) "
                              "VALUES(?, ?, ?)"));
  Statement statement(prepared);
  return Run(statement.Text(put.record.run).Int(put.record.next_member).Blob(put.record.secret));
}

absl::Status SqliteStore::Write(const DeleteRun& gone) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare("DELETE FROM runs WHERE run=?"));
  Statement statement(prepared);
  return Run(statement.Text(gone.run));
}

absl::Status SqliteStore::DeleteOf(const char* sql, const GroupKey& group) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare(sql));
  Statement statement(prepared);
  return Run(statement.Text(group.run).Int(group.group));
}

constexpr char kDeleteMembers[] = "DELETE FROM members WHERE run=? AND grp=?";
constexpr char kDeleteRing[] = "DELETE FROM ring WHERE run=? AND grp=?";
constexpr char kDeleteFates[] = "DELETE FROM fates WHERE run=? AND grp=?";
constexpr char kDeleteBlocked[] = "DELETE FROM blocked WHERE run=? AND grp=?";

absl::Status SqliteStore::Write(const PutGroup& put) {
  const GroupRecord& record = put.record;
  const auto it = records_.groups.find(record.group);
  const GroupRecord* old = it == records_.groups.end() ? nullptr : &it->second;
  {
    LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                        Prepare("INSERT OR REPLACE INTO groups(run, grp, committed, highest, "
                                "boundary, attempt, ballots, revision, state, manifest) "
                                "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"));
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement.Text(record.group.run)
                               .Int(record.group.group)
                               .Int(record.committed.value())
                               .Int(record.highest.value())
                               .Int(record.boundary.value())
                               .Int(record.attempt.value())
                               .Int(record.ballots)
                               .Int(record.state ? record.state->revision : 0)
                               .Text(record.state ? ToString(record.state->state) : "")
                               .Text(record.state ? ToString(record.state->manifest) : "")));
  }
  if (old == nullptr || old->members != record.members) LH_RETURN_IF_ERROR(WriteMembers(record));
  if (old == nullptr || old->peers != record.peers) LH_RETURN_IF_ERROR(WriteRing(record));
  if (old == nullptr || old->fates != record.fates) LH_RETURN_IF_ERROR(WriteFates(record));
  if (old == nullptr || old->blocked != record.blocked) LH_RETURN_IF_ERROR(WriteBlocked(record));
  return absl::OkStatus();
}

absl::Status SqliteStore::WriteMembers(const GroupRecord& record) {
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteMembers, record.group));
  LH_ASSIGN_OR_RETURN(
      sqlite3_stmt * prepared,
      Prepare(
          "INSERT INTO members(run, grp, rank, member, peer, request, name, "
          "joined, votes, syncs, cohort, cohort_size, after, step_deadline_ms, "
          "counts, departs, reason) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"));
  for (size_t rank = 0; rank < record.members.size(); ++rank) {
    const MemberRecord& member = record.members[rank];
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement.Text(record.group.run)
                               .Int(record.group.group)
                               .Int(rank)
                               .Text(ToString(member.member))
                               .Text(ToString(member.peer))
                               .Int(member.request)
                               .Text(member.name)
                               .Int(member.joined.value())
                               .Int(member.votes)
                               .Int(member.syncs)
                               .Text(member.cohort)
                               .Int(member.cohort_size)
                               .Int(member.after)
                               .Int(member.step_deadline_ms)
                               .Int(member.counts.value())
                               .Text(RemovalName(member))
                               .Text(member.departs ? member.departs->reason : "")));
  }
  return absl::OkStatus();
}

absl::Status SqliteStore::WriteRing(const GroupRecord& record) {
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteRing, record.group));
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("INSERT INTO ring(run, grp, position, peer, endpoints, lanes, host) "
                              "VALUES(?, ?, ?, ?, ?, ?, ?)"));
  for (size_t position = 0; position < record.peers.size(); ++position) {
    const PeerRecord& peer = record.peers[position];
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement.Text(record.group.run)
                               .Int(record.group.group)
                               .Int(position)
                               .Text(ToString(peer.peer))
                               .Text(JoinEndpoints(peer.endpoints))
                               .Int(peer.lanes)
                               .Text(peer.host)));
  }
  return absl::OkStatus();
}

absl::Status SqliteStore::WriteFates(const GroupRecord& record) {
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteFates, record.group));
  LH_ASSIGN_OR_RETURN(
      sqlite3_stmt * prepared,
      Prepare("INSERT INTO fates(run, grp, place, peer, ops) VALUES(?, ?, ?, ?, ?)"));
  for (size_t place = 0; place < record.fates.size(); ++place) {
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement.Text(record.group.run)
                               .Int(record.group.group)
                               .Int(place)
                               .Text(ToString(record.fates[place].peer))
                               .Text(JoinFates(record.fates[place]))));
  }
  return absl::OkStatus();
}

absl::Status SqliteStore::WriteBlocked(const GroupRecord& record) {
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteBlocked, record.group));
  LH_ASSIGN_OR_RETURN(
      sqlite3_stmt * prepared,
      Prepare("INSERT INTO blocked(run, grp, place, a, b, reason) VALUES(?, ?, ?, ?, ?, ?)"));
  for (size_t place = 0; place < record.blocked.size(); ++place) {
    Statement statement(prepared);
    LH_RETURN_IF_ERROR(Run(statement.Text(record.group.run)
                               .Int(record.group.group)
                               .Int(place)
                               .Text(ToString(record.blocked[place].pair.a))
                               .Text(ToString(record.blocked[place].pair.b))
                               .Text(record.blocked[place].reason)));
  }
  return absl::OkStatus();
}

absl::Status SqliteStore::Write(const DeleteGroup& gone) {
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteMembers, gone.group));
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteRing, gone.group));
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteFates, gone.group));
  LH_RETURN_IF_ERROR(DeleteOf(kDeleteBlocked, gone.group));
  return DeleteOf("DELETE FROM groups WHERE run=? AND grp=?", gone.group);
}

// ------------------------------------------------------------------------------ the files

absl::StatusOr<Fd> OpenFile(const std::string& path) {
  // Epoch tokens derive from what is inside: for the owner only.
  Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (fd.get() >= 0) return fd;
  return absl::UnavailableError(absl::StrCat("cannot open store ", path, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(const std::string& path) {
  LH_RETURN_IF_ERROR(MakeDirectoryOf("store", path));
  // SQLite would let two coordinators take turns.
  LH_ASSIGN_OR_RETURN(Fd lock, LockFile("store", path));
  {
    LH_ASSIGN_OR_RETURN(const Fd file, OpenFile(path));
    struct stat stat {};
    if (fstat(file.get(), &stat) != 0 || !S_ISREG(stat.st_mode)) {
      return absl::FailedPreconditionError(absl::StrCat("store ", path, " is not a regular file"));
    }
  }
  auto store = std::make_unique<SqliteStore>(path, std::move(lock));
  LH_RETURN_IF_ERROR(store->Open());
  return std::unique_ptr<Store>(std::move(store));
}

}  // namespace longhaul::coordinator

// The store in an SQLite file. The sqlite3 tool can read the file while the coordinator runs.
//
// One table holds all records. A record is JSON text, made from the fields of its struct
// (base/fields_json.h). Each list of a group is a kind of its own, with one record per element. For
// people there is one view per kind, with one column per field: SELECT * FROM members.
//
// The file uses a write-ahead log with synchronous=FULL: SQLite flushes the log (fsync) before
// COMMIT returns. So a crash of the process or of the machine loses no transaction that was
// reported, and leaves none half done. A disk that reports a flush too early may lose the last
// transactions; peers that come back then show that they are missing (Group::Attach). A mutation
// writes only the records that it changes, usually one or a few.
//
// A store of an older schema is copied to PATH-schema-N and then migrated, in one transaction.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <iterator>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/fields_json.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "coordinator/store/files.h"
#include "coordinator/store/store.h"
#include "sqlite3.h"

namespace longhaul::coordinator {
namespace {

constexpr int kApplicationId = 0x4c48434f;  // "LHCO"
// Rises with each change of a record's fields, because an older release refuses fields that it does
// not know. A test compares what is written with testdata/schema_N.sql.
constexpr int kSchemaVersion = 7;
constexpr int kOldestMigrated = 5;
constexpr int kBusyTimeoutMs = 5000;

// `name` and `number` say what the record belongs to: a run and a group in it; only a run; only a
// peer ("p1f"); only a token's id; or nothing. `place` is the index of an element in its list.
constexpr char kSchema[] = R"(
CREATE TABLE records(
  kind TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, place INTEGER NOT NULL,
  record TEXT NOT NULL CHECK(json_valid(record)),
  PRIMARY KEY(kind, name, number, place)) STRICT, WITHOUT ROWID;
)";

// Makes a store of the next schema from one of schema `from`. A new field needs no SQL: an old
// record does not have it, and the field gets its default.
struct Migration {
  int from;
  const char* sql;
};
constexpr Migration kMigrations[] = {
    // The table did not check what was written to it.
    {5, R"(
CREATE TABLE records_6(
  kind TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, place INTEGER NOT NULL,
  record TEXT NOT NULL CHECK(json_valid(record)),
  PRIMARY KEY(kind, name, number, place)) STRICT, WITHOUT ROWID;
INSERT INTO records_6 SELECT kind, name, number, place, record FROM records;
DROP TABLE records;
ALTER TABLE records_6 RENAME TO records;
)"},
    // There were no join tokens. An older release would let everybody in, so it must refuse a store
    // with tokens.
    {6, ""},
};
static_assert(std::size(kMigrations) == kSchemaVersion - kOldestMigrated);
constexpr char kStore[] = "store";
constexpr char kRuns[] = "runs";
constexpr char kGroups[] = "groups";
constexpr char kDrains[] = "drains";
constexpr char kTokens[] = "tokens";
constexpr JsonParts kText{.rows = false};  // elements of lists have records of their own

// Returns what is wrong with the record, or "" if nothing is.
template <HasFields T>
std::string ReadRecord(const std::string& text, T* record) {
  const std::string wrong = FromJson(text, record);
  return wrong.empty() ? FaultIn(*record) : wrong;
}

// Reads a record that is not an element of a list. There is only one such record, at place 0, and
// its key is the one in its row.
template <HasFields T, class Key>
std::string ReadOnly(const std::string& text, const Key& key, uint64_t place, T* record) {
  std::string wrong = ReadRecord(text, record);
  if (wrong.empty() && (place != 0 || record->Key() != key))
    wrong = "the record names another key than its row";
  return wrong;
}

// ------------------------------------------------------------------------------ views

// Calls visit(field) for each list of T whose elements are records of their own.
template <HasFields T, class Visit>
void ForEachList(Visit visit) {
  ForEachField<T>([&](const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field.rule)>, rule::Rows>) visit(field);
  });
}

// Gives ", json_extract(record, '$.member') AS member" for each field of T except `run` and
// `group`.
template <HasFields T>
std::string Columns() {
  std::string columns;
  ForEachField<T>([&](const auto& field) {
    using Rule = std::decay_t<decltype(field.rule)>;
    const std::string name = field.name;
    if constexpr (std::is_same_v<Rule, rule::Flat>) {
      columns += Columns<std::decay_t<decltype(std::declval<T>().*field.member)>>();
    } else if (!std::is_same_v<Rule, rule::Rows> && name != "run" && name != "group") {
      absl::StrAppend(&columns, ", json_extract(record, '$.", name, "') AS \"", name, "\"");
    }
  });
  return columns;
}

template <HasFields T>
std::string View(const std::string& kind, const std::string& key) {
  return absl::StrCat("CREATE VIEW ", kind, " AS SELECT ", key, Columns<T>(),
                      " FROM records WHERE kind='", kind, "' ORDER BY name, number, place;");
}

std::string Views() {
  std::string sql = View<StoreRecord>(kStore, "place") + View<DrainRecord>(kDrains, "place");
  sql += View<TokenRecord>(kTokens, "json_extract(record, '$.run') AS run");
  sql += View<RunRecord>(kRuns, "name AS run");
  sql += View<GroupRecord>(kGroups, "name AS run, number AS grp");
  ForEachList<GroupRecord>([&](const auto& list) {
    using List = std::decay_t<decltype(std::declval<GroupRecord>().*list.member)>;
    sql += View<typename List::value_type>(list.name, "name AS run, number AS grp, place");
  });
  return sql;
}

// ------------------------------------------------------------------------------ SQLite

// One use of a prepared statement; destroying it resets the statement. Binds parameters and reads
// columns in order.
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
  // A 64-bit number keeps its bits. SQLite shows numbers of the upper half as negative.
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

 private:
  sqlite3_stmt* const statement_;
  int bound_ = 0;
  int column_ = 0;
};

class SqliteStore final : public Store {
 public:
  SqliteStore(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  ~SqliteStore() override {
    for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
    sqlite3_close(db_);
  }

  absl::Status Open();
  absl::StatusOr<Records> Load() override;
  absl::Status Apply(const std::vector<Mutation>& mutations) override;
  absl::StatusOr<std::vector<TokenRecord>> LoadTokens() override;
  absl::Status ChangeTokens(const TokenChange& change) override;
  std::string Name() const override { return absl::StrCat("sqlite:", path_); }

 private:
  // An error about `what`, with SQLite's own text.
  absl::Status Error(const std::string& what) const;
  absl::Status Corrupt(const std::string& what) const {
    return absl::DataLossError(absl::StrCat("store ", path_, " is corrupt: ", what,
                                            "; restore a copy, or move the file away: then all "
                                            "members have to join again"));
  }

  absl::Status Execute(const char* sql);
  absl::StatusOr<std::string> Pragma(const char* sql);
  absl::StatusOr<sqlite3_stmt*> Prepare(const char* sql);
  // Runs a statement that returns no rows.
  absl::Status Run(Statement& statement);

  absl::Status CheckFormat();
  absl::Status Configure();
  // Makes this version's schema from schema `from` (0: the file is new), and reads all records. The
  // caller has begun a transaction.
  absl::Status Migrate(int from);
  absl::Status DropViews();
  absl::Status CopyTo(const std::string& path);

  // Calls take(key, place, text) for each record of a kind. `take` returns what is wrong with the
  // record, or "" if nothing is.
  template <class Take>
  absl::Status ForEach(const std::string& kind, Take take);

  absl::Status Put(const std::string& kind, const GroupKey& of, size_t place,
                   const std::string& text);
  // Deletes the records at `place` and behind it.
  absl::Status Delete(const std::string& kind, const GroupKey& of, size_t place);

  // Calls `write` in a transaction.
  template <class Call>
  absl::Status InTransaction(Call write);

  absl::Status Write(const Mutation& mutation);
  absl::Status Write(const PutStore& put);
  absl::Status Write(const PutDrain& put);
  absl::Status Write(const DeleteDrain& gone);
  absl::Status Write(const PutRun& put);
  absl::Status Write(const DeleteRun& gone);
  absl::Status Write(const PutGroup& put);
  absl::Status Write(const DeleteGroup& gone);

  const std::string path_;
  const UniqueFd lock_;
  sqlite3* db_ = nullptr;
  std::map<const char*, sqlite3_stmt*> statements_;  // by the address of its SQL literal
  Records records_;                                  // what the file holds
  absl::Status broken_;                              // the first failed Apply()
};

absl::Status SqliteStore::Error(const std::string& what) const {
  const int system = errno;  // SQLite keeps that of opening files only
  const int code = sqlite3_errcode(db_) & 0xff;
  const std::string seen = absl::StrCat("store ", path_, ": ", what, ": ", sqlite3_errmsg(db_));
  if (code == SQLITE_CORRUPT) return Corrupt(sqlite3_errmsg(db_));
  if (code == SQLITE_NOTADB) {
    return absl::FailedPreconditionError(
        absl::StrCat(seen, "; --store must name a file that a coordinator made, or a new one"));
  }
  if (code == SQLITE_BUSY || code == SQLITE_LOCKED) {
    return absl::UnavailableError(
        absl::StrCat(seen, "; another program has a transaction open on the file: end it"));
  }
  if (code == SQLITE_FULL) {
    return absl::UnavailableError(absl::StrCat(seen, "; make room on the disk"));
  }
  // "disk I/O error" alone does not tell a limit of file sizes from a broken disk.
  if (code == SQLITE_IOERR && (system == EFBIG || system == EDQUOT || system == EROFS)) {
    return absl::UnavailableError(absl::StrCat(seen, " (", strerror(system), ")"));
  }
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
  return Configure();
}

// Refuses a file that this version cannot use, before anything is written to it.
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
  // Early builds wrote schema 5 with other tables.
  LH_ASSIGN_OR_RETURN(const std::string found,
                      Pragma("SELECT count(*) FROM sqlite_master WHERE name='records'"));
  if (number < kOldestMigrated || found == "0") {
    return absl::FailedPreconditionError(absl::StrCat(
        "store ", path_, " was written by a much older coordinator: its schema is ", number,
        ", this version migrates schemas from ", kOldestMigrated,
        " on; open it with a release in between first, or move the file away: then all members "
        "have to join again"));
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
                     "); put the store on a local disk"));
  }
  LH_RETURN_IF_ERROR(Execute("PRAGMA synchronous=FULL"));
  LH_ASSIGN_OR_RETURN(const std::string version, Pragma("PRAGMA user_version"));
  int from = 0;
  if (!absl::SimpleAtoi(version, &from)) return Corrupt("it has no version");
  const bool older = from != 0 && from != kSchemaVersion;
  const std::string copy = absl::StrCat(path_, "-schema-", from);
  if (older) LH_RETURN_IF_ERROR(CopyTo(copy));
  LH_RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  absl::Status status = Migrate(from);
  if (status.ok()) status = Execute("COMMIT");
  if (!status.ok()) {
    sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return status;
  }
  if (older) {
    Log(LogLevel::kInfo,
        absl::StrCat("store migrated from_schema=", from, " to_schema=", kSchemaVersion,
                     LogField("path", path_), LogField("copy_of_the_old_one", copy)));
  }
  return absl::OkStatus();
}

absl::Status SqliteStore::Migrate(int from) {
  // SQLite refuses to rename a table while a view names one that is gone.
  LH_RETURN_IF_ERROR(DropViews());
  if (from == 0) LH_RETURN_IF_ERROR(Execute(kSchema));
  for (const Migration& migration : kMigrations) {
    if (from != 0 && from <= migration.from) LH_RETURN_IF_ERROR(Execute(migration.sql));
  }
  LH_RETURN_IF_ERROR(Execute(absl::StrCat(Views(), "PRAGMA application_id=", kApplicationId,
                                          ";PRAGMA user_version=", kSchemaVersion)
                                 .c_str()));
  // Read before the commit: a store that cannot be read stays as it was.
  absl::StatusOr<Records> records = Load();
  if (!records.ok()) return records.status();
  records_ = *std::move(records);
  return LoadTokens().status();
}

absl::Status SqliteStore::DropViews() {
  std::string sql;
  {
    LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                        Prepare("SELECT format('DROP VIEW \"%w\";', name) FROM sqlite_master "
                                "WHERE type='view'"));
    Statement statement(prepared);
    int step = 0;
    while ((step = statement.Step()) == SQLITE_ROW) sql += statement.TakeText();
    if (step != SQLITE_DONE) return Error("cannot read");
  }
  return Execute(sql.c_str());
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path) {
  // The file holds secrets from which epoch tokens derive, so only the owner may read it.
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (fd.get() >= 0) return fd;
  return absl::UnavailableError(absl::StrCat("cannot open store ", path, ": ", strerror(errno)));
}

absl::Status SqliteStore::CopyTo(const std::string& path) {
  // SQLite writes into a file that is there if it is empty. So only the owner may read this one.
  LH_ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path));
  absl::Status status;
  if (ftruncate(file.get(), 0) != 0) {
    status = absl::UnavailableError(strerror(errno));
  } else {
    LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared, Prepare("VACUUM INTO ?"));
    Statement statement(prepared);
    status = Run(statement.Text(path));
  }
  if (status.ok() && fsync(file.get()) != 0) status = absl::UnavailableError(strerror(errno));
  if (status.ok()) return status;
  unlink(path.c_str());
  return absl::UnavailableError(
      absl::StrCat("store ", path_, " is of an older release, and cannot ", "be copied to ", path,
                   " before it is migrated: ", status.message(), "; the store has not changed"));
}

// ------------------------------------------------------------------------------ reading

template <class Take>
absl::Status SqliteStore::ForEach(const std::string& kind, Take take) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("SELECT name, number, place, record FROM records WHERE kind=? "
                              "ORDER BY name, number, place"));
  Statement statement(prepared);
  statement.Text(kind);
  int step = 0;
  while ((step = statement.Step()) == SQLITE_ROW) {
    const std::string name = statement.TakeText();
    const auto number = static_cast<uint32_t>(statement.TakeInt());
    const uint64_t place = statement.TakeInt();
    const std::string wrong = take(GroupKey{name, number}, place, statement.TakeText());
    if (wrong.empty()) continue;
    return Corrupt(
        absl::StrCat("record ", place, " of ", kind, " of ", name, "/", number, ": ", wrong));
  }
  return step == SQLITE_DONE ? absl::OkStatus() : Error("cannot read");
}

absl::StatusOr<Records> SqliteStore::Load() {
  Records records;
  LH_RETURN_IF_ERROR(
      ForEach(kStore, [&](const GroupKey&, uint64_t, const std::string& text) -> std::string {
        std::string wrong = ReadRecord(text, &records.store);
        if (wrong.empty() && records.store.store == 0) wrong = "its name is 0";
        return wrong;
      }));
  LH_RETURN_IF_ERROR(ForEach(
      kDrains, [&](const GroupKey& key, uint64_t place, const std::string& text) -> std::string {
        PeerId peer;
        if (!ParseId(key.run, &peer)) return "there is no such peer";
        return ReadOnly(text, peer, place, &records.drains[peer]);
      }));
  LH_RETURN_IF_ERROR(ForEach(
      kRuns, [&](const GroupKey& key, uint64_t place, const std::string& text) -> std::string {
        return ReadOnly(text, key.run, place, &records.runs[key.run]);
      }));
  LH_RETURN_IF_ERROR(ForEach(
      kGroups, [&](const GroupKey& key, uint64_t place, const std::string& text) -> std::string {
        if (!records.runs.contains(key.run)) return "there is no such run";
        return ReadOnly(text, key, place, &records.groups[key]);
      }));
  absl::Status status;
  ForEachList<GroupRecord>([&](const auto& list) {
    if (!status.ok()) return;
    status =
        ForEach(list.name,
                [&](const GroupKey& key, uint64_t place, const std::string& text) -> std::string {
                  const auto group = records.groups.find(key);
                  if (group == records.groups.end()) return "there is no such group";
                  auto& elements = group->second.*list.member;
                  if (elements.size() != place) return "the record before it is missing";
                  return ReadRecord(text, &elements.emplace_back());
                });
  });
  if (!status.ok()) return status;
  return records;
}

absl::StatusOr<std::vector<TokenRecord>> SqliteStore::LoadTokens() {
  std::vector<TokenRecord> tokens;
  LH_RETURN_IF_ERROR(ForEach(
      kTokens, [&](const GroupKey& key, uint64_t place, const std::string& text) -> std::string {
        return ReadOnly(text, key.run, place, &tokens.emplace_back());
      }));
  return tokens;
}

// ------------------------------------------------------------------------------ writing

template <class Call>
absl::Status SqliteStore::InTransaction(Call write) {
  if (!broken_.ok()) return broken_;
  broken_ = Execute("BEGIN IMMEDIATE");
  if (broken_.ok()) broken_ = write();
  if (broken_.ok()) broken_ = Execute("COMMIT");
  if (!broken_.ok()) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
  return broken_;
}

absl::Status SqliteStore::Apply(const std::vector<Mutation>& mutations) {
  return InTransaction([&] {
    absl::Status status;
    for (size_t i = 0; status.ok() && i < mutations.size(); ++i) status = Write(mutations[i]);
    return status;
  });
}

absl::Status SqliteStore::ChangeTokens(const TokenChange& change) {
  return InTransaction([&] {
    absl::Status status;
    for (size_t i = 0; status.ok() && i < change.gone.size(); ++i) {
      status = Delete(kTokens, {change.gone[i], 0}, 0);
    }
    if (status.ok() && change.put) {
      status = Put(kTokens, {change.put->id, 0}, 0, ToJson(*change.put, kText));
    }
    return status;
  });
}

absl::Status SqliteStore::Write(const Mutation& mutation) {
  LH_RETURN_IF_ERROR(std::visit([this](const auto& m) { return Write(m); }, mutation));
  coordinator::Apply(mutation, &records_);
  return absl::OkStatus();
}

absl::Status SqliteStore::Put(const std::string& kind, const GroupKey& of, size_t place,
                              const std::string& text) {
  LH_ASSIGN_OR_RETURN(sqlite3_stmt * prepared,
                      Prepare("INSERT OR REPLACE INTO records(kind, name, number, place, record) "
                              "VALUES(?, ?, ?, ?, ?)"));
  Statement statement(prepared);
  return Run(statement.Text(kind).Text(of.run).Int(of.group).Int(place).Text(text));
}

absl::Status SqliteStore::Delete(const std::string& kind, const GroupKey& of, size_t place) {
  LH_ASSIGN_OR_RETURN(
      sqlite3_stmt * prepared,
      Prepare("DELETE FROM records WHERE kind=? AND name=? AND number=? AND place>=?"));
  Statement statement(prepared);
  return Run(statement.Text(kind).Text(of.run).Int(of.group).Int(place));
}

absl::Status SqliteStore::Write(const PutStore& put) {
  return Put(kStore, {}, 0, ToJson(put.record, kText));
}

absl::Status SqliteStore::Write(const PutDrain& put) {
  return Put(kDrains, {ToString(put.record.peer), 0}, 0, ToJson(put.record, kText));
}

absl::Status SqliteStore::Write(const DeleteDrain& gone) {
  return Delete(kDrains, {ToString(gone.peer), 0}, 0);
}

absl::Status SqliteStore::Write(const PutRun& put) {
  return Put(kRuns, {put.record.run, 0}, 0, ToJson(put.record, kText));
}

absl::Status SqliteStore::Write(const DeleteRun& gone) { return Delete(kRuns, {gone.run, 0}, 0); }

absl::Status SqliteStore::Write(const PutGroup& put) {
  const GroupRecord& record = put.record;
  const GroupRecord& old = records_.groups[record.group];
  const std::string text = ToJson(record, kText);
  absl::Status status;
  if (text != ToJson(old, kText)) status = Put(kGroups, record.group, 0, text);
  ForEachList<GroupRecord>([&](const auto& list) {
    const auto& now = record.*list.member;
    const auto& before = old.*list.member;
    for (size_t place = 0; status.ok() && place < now.size(); ++place) {
      if (place < before.size() && now[place] == before[place]) continue;
      status = Put(list.name, record.group, place, ToJson(now[place], kText));
    }
    if (status.ok() && now.size() < before.size()) {
      status = Delete(list.name, record.group, now.size());
    }
  });
  return status;
}

absl::Status SqliteStore::Write(const DeleteGroup& gone) {
  absl::Status status = Delete(kGroups, gone.group, 0);
  ForEachList<GroupRecord>([&](const auto& list) {
    if (status.ok()) status = Delete(list.name, gone.group, 0);
  });
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenSqliteStore(const std::string& path) {
  LH_RETURN_IF_ERROR(MakeDirectoryOf(path));
  // SQLite itself would let two coordinators take turns on one file.
  LH_ASSIGN_OR_RETURN(UniqueFd lock, LockFile(path));
  {
    LH_ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(path));
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

// Tests the contract with both stores, and the errors that only a file can have.
#include "coordinator/store/store.h"

#include <linux/capability.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sqlite3.h"

namespace longhaul::coordinator {
namespace {

using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

std::string NewPath() {
  static int number = 0;
  const std::string path =
      absl::StrCat(::testing::TempDir(), "/store_", getpid(), "_", ++number, ".db");
  for (const char* suffix : {"", "-wal", "-shm", "-lock"}) unlink((path + suffix).c_str());
  return path;
}

// Directories for DefaultStore(), and what it says of them.
class DefaultStoreTest : public ::testing::Test {
 protected:
  DefaultStoreTest() {
    char made[] = "/tmp/default_store_XXXXXX";
    root_ = mkdtemp(made);
    variables_["HOME"] = root_ + "/home";
  }
  ~DefaultStoreTest() override {
    SetLogSink(nullptr);
    std::filesystem::remove_all(root_);
  }

  void MakeStoreIn(const std::string& directory) {
    std::filesystem::create_directories(directory);
    ASSERT_TRUE(OpenSqliteStore(directory + "/coordinator.db").ok());
  }

  // Without "sqlite:".
  absl::StatusOr<std::string> Default() {
    log_.clear();
    SetLogSink([this](std::string_view line) { log_ += std::string(line) + "\n"; });
    const absl::StatusOr<std::string> spec = DefaultStore(system_, [&](const char* name) {
      return variables_.contains(name) ? variables_[name].c_str() : nullptr;
    });
    SetLogSink(nullptr);
    if (!spec.ok()) return spec.status();
    EXPECT_EQ(spec->substr(0, 7), "sqlite:");
    return spec->substr(7);
  }

  std::map<std::string, std::string> variables_;
  std::string root_;
  std::string system_;
  std::string log_;
};

TEST_F(DefaultStoreTest, ANewOneIsInTheFirstPlaceThatCanBeWritten) {
  system_ = root_ + "/system";
  EXPECT_EQ(*Default(), system_ + "/coordinator.db") << "the directory can be made";
  EXPECT_EQ(log_, "");
  system_ = root_ + "/no/such";
  EXPECT_EQ(*Default(), root_ + "/home/.local/state/longhaul/coordinator.db");
  EXPECT_THAT(log_, HasSubstr("WARNING"));
  EXPECT_THAT(log_, HasSubstr("reason=\"No such file or directory\""));
  EXPECT_TRUE(OpenSqliteStore(*Default()).ok()) << "a new user has no ~/.local";
  variables_["XDG_STATE_HOME"] = root_ + "/state";
  EXPECT_EQ(*Default(), root_ + "/home/.local/state/longhaul/coordinator.db") << "that of before";
  std::filesystem::remove_all(root_ + "/home");
  EXPECT_EQ(*Default(), root_ + "/state/longhaul/coordinator.db");
  variables_["XDG_STATE_HOME"] = "relative";
  EXPECT_EQ(*Default(), root_ + "/home/.local/state/longhaul/coordinator.db")
      << "the standard says to ignore such a value";
  variables_.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(Default().status()));
}

// A coordinator that began with an empty store would remove all members.
TEST_F(DefaultStoreTest, AStoreThatCannotBeUsedIsNotReplacedByAnEmptyOne) {
  system_ = root_ + "/system";
  MakeStoreIn(system_);
  EXPECT_EQ(*Default(), system_ + "/coordinator.db");
  const auto refused = [this](const char* why) {
    const absl::Status status = Default().status();
    return absl::IsFailedPrecondition(status) && log_.empty() &&
           absl::StrContains(status.message(), system_ + "/coordinator.db") &&
           absl::StrContains(status.message(), why) &&
           absl::StrContains(status.message(), "would remove all members");
  };
  // Root, too, needs permission then.
  const auto without_rights = [](const auto& holds) {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    __user_cap_data_struct none[2] = {};
    if (syscall(SYS_capset, &header, none) != 0) exit(2);
    exit(holds() ? 0 : 1);
  };
  ASSERT_EQ(chmod(system_.c_str(), 0555), 0);
  EXPECT_EXIT(without_rights([&] { return refused("cannot write"); }), ExitedWithCode(0), "");
  ASSERT_EQ(chmod(system_.c_str(), 0), 0);
  EXPECT_EXIT(without_rights([&] { return refused("cannot see"); }), ExitedWithCode(0), "");
  // The file was moved away, and its lock is still there.
  ASSERT_EQ(chmod(system_.c_str(), 0555), 0);
  std::filesystem::remove(system_ + "/coordinator.db");
  EXPECT_EXIT(without_rights([&] { return refused("cannot write"); }), ExitedWithCode(0), "");
}

TEST_F(DefaultStoreTest, AStoreElsewhereStaysInUse) {
  system_ = root_ + "/system";
  const std::string own = root_ + "/home/.local/state/longhaul";
  MakeStoreIn(own);
  EXPECT_EQ(*Default(), own + "/coordinator.db") << "though the system's directory can be made now";
  EXPECT_THAT(log_, HasSubstr("WARNING the store is that of an earlier start"));
  EXPECT_THAT(log_, HasSubstr("instead_of=" + system_));
}

RunRecord SomeRun(const std::string& name) {
  return {name, 7, std::string("\0\x01secret\xff", 9) + std::string(kSecretBytes - 9, 'x')};
}

GroupRecord SomeGroup(const std::string& run, uint32_t number) {
  GroupRecord group;
  group.group = {run, number};
  group.committed = Epoch(4);
  group.highest = Epoch(6);
  group.boundary = Epoch(3);
  group.last_freeze = Epoch(4);
  group.members = {
      {MemberId(2), PeerId(UINT64_MAX), UINT64_MAX, "trainer-a", Epoch(1), 12},
      {MemberId(1), PeerId(0x1f), 9, "", Epoch(3), 0},
      {MemberId(5), PeerId(0x20), 1, "late", Epoch(), 0},
  };
  group.peers = {
      {PeerId(0x1f), {"10.0.0.1:29700", "[::1]:29700", "odd,%2c%,name"}, 16, "host a, \"b\""},
      {PeerId(UINT64_MAX), {}, 0, ""},
      {PeerId(0x20), {"", ""}, 1, std::string("nul\0inside", 10)},
  };
  group.ballots = 17;
  group.state = StateRecord{UINT64_MAX - 1, {0, UINT64_MAX}, {UINT64_MAX, 1}};
  group.members[0].syncs = UINT64_MAX;
  group.members[0].cohort = "host-a";
  group.members[0].cohort_size = 256;
  group.members[0].after = 11;
  group.members[0].step_deadline_ms = 86400000;
  group.members[0].background_until = Epoch(3);
  group.members[1].background_until = control::kInBackground;
  group.members[0].departs = Departure{control::Removal::kEvicted, "by an operator: \"x\", 'y'"};
  group.members[1].departs = Departure{control::Removal::kLeft, ""};
  group.members[2].cohort = "b";
  group.members[2].cohort_size = 2;
  group.members[2].after = kCohortIncomplete;
  group.blocked = {{{PeerId(0x1f), PeerId(0x20), PeerId(0x21)}, "no route, 100%"},
                   {{PeerId(0x20), PeerId(UINT64_MAX), PeerId()}, ""}};
  group.fates = {
      {PeerId(0x1f),
       {{OpOrdinal(3), control::Fate::kCommit}, {OpOrdinal(4), control::Fate::kRedo}},
       {}},
      {PeerId(0x20),
       {{OpOrdinal(UINT64_MAX), control::Fate::kAbort}},
       {{Epoch(2), 0}, {Epoch(UINT64_MAX), UINT64_MAX}}},
      {PeerId(0x21), {}, {{Epoch(2), 7}}},
      {PeerId(0x22), {}, {}},
  };
  return group;
}

TokenRecord SomeToken(const std::string& id) {
  TokenRecord token;
  token.id = id;
  token.hash = std::string("\0\xff", 2) + std::string(kTokenHashBytes - 2, 'h');
  token.run = kAllRuns;
  token.role = Role::kTrainer;
  token.label = "site \"b\"";
  token.created_s = 1;
  token.expires_s = UINT64_MAX;
  token.revoked_s = 3;
  token.quota = {4, 5, UINT32_MAX};
  return token;
}

TokenRecord OtherToken() {
  TokenRecord token = SomeToken("00000000000b");
  token.run = "a";
  token.role = Role::kOperator;
  token.label = "";
  token.revoked_s = 0;
  token.quota = {};
  return token;
}

// ------------------------------------------------------------------------------ the contract

class StoreContract : public ::testing::TestWithParam<const char*> {
 protected:
  StoreContract() {
    spec_ = GetParam();
    if (spec_ == "sqlite") spec_ = "sqlite:" + NewPath();
    Open();
  }
  void Open() {
    store_.reset();
    auto store = OpenStore(spec_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  // Applies mutations to the store and to a model, and compares the two. A store in a file is also
  // closed and opened again.
  void ApplyAndCompare(const std::vector<Mutation>& mutations) {
    ASSERT_TRUE(store_->Apply(mutations).ok());
    for (const Mutation& mutation : mutations) coordinator::Apply(mutation, &model_);
    Compare();
    if (spec_ == "memory") return;
    Open();
    Compare();
  }
  void Compare() {
    const auto records = store_->Load();
    ASSERT_TRUE(records.ok()) << records.status();
    EXPECT_TRUE(*records == model_);
  }

  std::string spec_;
  std::unique_ptr<Store> store_;
  Records model_;
};

TEST_P(StoreContract, BeginsEmpty) { Compare(); }

TEST_P(StoreContract, KeepsEveryFieldOfEveryRecord) {
  ApplyAndCompare({PutRun{SomeRun("a")}, PutGroup{SomeGroup("a", 0)}, PutGroup{SomeGroup("a", 7)}});
  ApplyAndCompare({PutRun{SomeRun("b")}, PutGroup{SomeGroup("b", UINT32_MAX)}});
}

TEST_P(StoreContract, KeepsItsNameItsTermAndDrains) {
  ApplyAndCompare({PutStore{{UINT64_MAX, 1}}, PutDrain{{PeerId(0x1f), "a \"reason\""}}});
  ApplyAndCompare(
      {PutStore{{UINT64_MAX, 2}}, PutDrain{{PeerId(0x1f), "another"}}, PutDrain{{PeerId(2), ""}}});
  ApplyAndCompare({DeleteDrain{PeerId(0x1f)}, DeleteDrain{PeerId(3)}});
}

TEST_P(StoreContract, KeepsTokensApartFromRecords) {
  TokenRecord first = SomeToken("00000000000a");
  ASSERT_TRUE(store_->ChangeTokens({first, {}}).ok());
  ASSERT_TRUE(store_->ChangeTokens({OtherToken(), {"ffffffffffff"}}).ok());
  ApplyAndCompare({PutRun{SomeRun("a")}});
  EXPECT_EQ(*store_->LoadTokens(), (std::vector<TokenRecord>{first, OtherToken()}));
  first.revoked_s = 17;
  ASSERT_TRUE(store_->ChangeTokens({first, {OtherToken().id}}).ok());
  EXPECT_EQ(*store_->LoadTokens(), std::vector<TokenRecord>{first});
  ApplyAndCompare({DeleteRun{"a"}});
  EXPECT_EQ(*store_->LoadTokens(), std::vector<TokenRecord>{first});
  ASSERT_TRUE(store_->ChangeTokens({std::nullopt, {first.id}}).ok());
  EXPECT_TRUE(store_->LoadTokens()->empty());
}

TEST_P(StoreContract, ReplacesAndDeletes) {
  ApplyAndCompare({PutRun{SomeRun("a")}, PutGroup{SomeGroup("a", 0)}, PutGroup{SomeGroup("a", 1)}});
  GroupRecord group = SomeGroup("a", 0);
  group.members.pop_back();
  group.members[0].votes = 13;
  group.members[1].syncs = 13;
  group.highest = Epoch(9);
  group.state.reset();
  ApplyAndCompare({PutGroup{group}});
  group.peers.erase(group.peers.begin());
  group.fates.clear();
  ApplyAndCompare({PutGroup{group}});
  RunRecord run = SomeRun("a");
  run.next_member = 100;
  ApplyAndCompare({PutRun{run}, DeleteGroup{{"a", 1}}});
  ApplyAndCompare({DeleteGroup{{"a", 0}}, DeleteRun{"a"}});
  ApplyAndCompare({DeleteGroup{{"nobody", 0}}, DeleteRun{"nobody"}});
}

TEST_P(StoreContract, LaterMutationsOfATransactionWin) {
  GroupRecord second = SomeGroup("a", 0);
  second.members.clear();
  ApplyAndCompare({PutRun{SomeRun("a")}, PutGroup{SomeGroup("a", 0)}, PutGroup{second}});
  ApplyAndCompare({PutGroup{SomeGroup("a", 0)}, DeleteGroup{{"a", 0}}, PutGroup{second}});
}

TEST_P(StoreContract, EmptyTransactionChangesNothing) { ApplyAndCompare({}); }

TEST_P(StoreContract, RandomMutationsMatchTheModel) {
  std::mt19937_64 random(20240817);
  for (int i = 0; i < 60; ++i) {
    std::vector<Mutation> mutations;
    for (uint64_t n = random() % 4 + 1; n > 0; --n) {
      const std::string run(1, static_cast<char>('a' + random() % 3));
      const GroupKey key{run, static_cast<uint32_t>(random() % 2)};
      if (random() % 8 == 0) {
        mutations.push_back(DeleteGroup{key});
        continue;
      }
      GroupRecord group = SomeGroup(key.run, key.group);
      group.highest = Epoch(random() % 50);
      if (random() % 2 == 0) group.state.reset();
      group.members.resize(random() % 4);
      for (MemberRecord& member : group.members) member.votes = random() % 2;
      group.peers.resize(random() % 4);
      group.fates.resize(random() % 4);
      mutations.push_back(PutRun{SomeRun(run)});
      mutations.push_back(PutGroup{group});
    }
    ApplyAndCompare(mutations);
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, ::testing::Values("memory", "sqlite"),
                         [](const auto& info) { return std::string(info.param); });

// ------------------------------------------------------------------------------ --store

std::string OpenError(const std::string& spec, absl::StatusCode code) {
  const auto store = OpenStore(spec);
  EXPECT_EQ(store.status().code(), code) << store.status();
  return std::string(store.status().message());
}

TEST(OpenStore, RefusesWhatItDoesNotKnow) {
  const auto bad = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(OpenError("etcd:http://h:2379", bad), HasSubstr("etcd is not in this version"));
  EXPECT_THAT(OpenError("etcd", bad), HasSubstr("etcd is not in this version"));
  EXPECT_THAT(OpenError("sqlite:", bad), HasSubstr("needs a path"));
  EXPECT_THAT(OpenError("", bad), HasSubstr("give --store=sqlite:PATH"));
  EXPECT_THAT(OpenError("redis:x", bad), HasSubstr("no such store"));
}

// ------------------------------------------------------------------------------ the file

class SqliteFile : public ::testing::Test {
 protected:
  std::string Error(absl::StatusCode code) { return OpenError("sqlite:" + path_, code); }
  void Create() {
    auto store = OpenSqliteStore(path_);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->Apply({PutRun{SomeRun("a")}, PutGroup{SomeGroup("a", 0)}}).ok());
  }
  void Execute(const std::string& sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
    char* error = nullptr;
    EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, &error), SQLITE_OK) << error;
    sqlite3_close(db);
  }

  const std::string path_ = NewPath();
};

TEST_F(SqliteFile, SecondCoordinatorIsRefusedUntilTheFirstIsGone) {
  auto first = OpenSqliteStore(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition),
              HasSubstr(absl::StrCat("in use by another coordinator (process ", getpid(), ")")));
  first->reset();
  EXPECT_TRUE(OpenSqliteStore(path_).ok());
}

TEST_F(SqliteFile, FileOfANewerVersionIsRefused) {
  Create();
  Execute("PRAGMA user_version=8");
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition),
              HasSubstr("its schema is 8, this version knows up to 7; run the newer one"));
}

TEST_F(SqliteFile, FileOfAMuchOlderVersionIsRefusedWithWhatToDo) {
  Create();
  Execute("PRAGMA user_version=4");
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition),
              HasSubstr("its schema is 4, this version migrates schemas from 5 on; open it with"));
}

TEST_F(SqliteFile, FileWithTheTablesOfAnEarlyBuildIsRefused) {
  Execute("CREATE TABLE runs(run TEXT); PRAGMA application_id=0x4c48434f; PRAGMA user_version=5");
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition), HasSubstr("a much older coordinator"));
}

// ------------------------------------------------------------------------------ migration

// testdata/schema_N.sql is what the last release with schema N wrote for SomeGroup("a", 0).
std::string Fixture(int schema) {
  std::ifstream file(absl::StrCat("coordinator/store/testdata/schema_", schema, ".sql"));
  EXPECT_TRUE(file.is_open()) << schema;
  return {std::istreambuf_iterator<char>(file), {}};
}

class Migration : public SqliteFile {
 protected:
  std::string copy() const { return path_ + "-schema-5"; }
  void TearDown() override { unlink(copy().c_str()); }
  // Opens the store, which must hold what the fixtures hold.
  void ExpectRecords(const std::string& path) {
    auto store = OpenSqliteStore(path);
    ASSERT_TRUE(store.ok()) << store.status();
    const auto records = (*store)->Load();
    ASSERT_TRUE(records.ok()) << records.status();
    Records expected;
    expected.runs["a"] = SomeRun("a");
    expected.groups[{"a", 0}] = SomeGroup("a", 0);
    EXPECT_TRUE(*records == expected);
  }
  // All tables and rows, as SQL.
  std::string Dump() {
    return Query(
        "SELECT sql || ';' FROM sqlite_master WHERE type='table' UNION ALL "
        "SELECT format('PRAGMA application_id=%d;', application_id) FROM pragma_application_id "
        "UNION ALL SELECT format('PRAGMA user_version=%d;', user_version) FROM pragma_user_version "
        "UNION ALL SELECT * FROM (SELECT format('INSERT INTO records VALUES(%Q, %Q, %d, %d, %Q);', "
        "kind, name, number, place, record) FROM records ORDER BY kind, name, number, place)");
  }
  // The first column of all rows, a line each.
  std::string Query(const std::string& sql) {
    sqlite3* db = nullptr;
    EXPECT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
    std::string text;
    const auto add = [](void* to, int, char** values, char**) {
      absl::StrAppend(static_cast<std::string*>(to), values[0], "\n");
      return 0;
    };
    char* error = nullptr;
    EXPECT_EQ(sqlite3_exec(db, sql.c_str(), add, &text, &error), SQLITE_OK) << error;
    sqlite3_close(db);
    return text;
  }
};

TEST_F(Migration, AStoreOfThePreviousSchemaKeepsAllRecordsAndACopyStays) {
  Execute(Fixture(5));
  Execute("CREATE VIEW \"of an \"\" older release\" AS SELECT kind FROM records");
  const std::string before = Dump();
  ExpectRecords(path_);
  EXPECT_EQ(Query("PRAGMA user_version"), "7\n");
  EXPECT_EQ(Query("SELECT count(*) FROM sqlite_master WHERE name LIKE 'of an%'"), "0\n");
  EXPECT_EQ(Query("SELECT member FROM members WHERE place=0"), "m2\n");

  // The copy is what the older release needs. Only the owner may read it.
  struct stat stat {};
  ASSERT_EQ(::stat(copy().c_str(), &stat), 0);
  EXPECT_EQ(stat.st_mode & 0777, 0600u);
  for (const char* suffix : {"", "-wal", "-shm"}) unlink((path_ + suffix).c_str());
  ASSERT_EQ(rename(copy().c_str(), path_.c_str()), 0);
  EXPECT_EQ(Dump(), before);
  ExpectRecords(path_);
}

TEST_F(Migration, AStoreOfTheSchemaBeforeTokensHasNone) {
  Execute(Fixture(6));
  ExpectRecords(path_);
  EXPECT_EQ(Query("PRAGMA user_version"), "7\n");
  auto store = OpenSqliteStore(path_);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->LoadTokens().ok());
  EXPECT_TRUE((*store)->LoadTokens()->empty());
  store->reset();
  unlink((path_ + "-schema-6").c_str());
}

TEST_F(Migration, AStoreThatCannotBeReadAfterwardsStaysAsItWas) {
  Execute(Fixture(5));
  Execute("UPDATE records SET record='{' WHERE kind='runs'");
  const std::string before = Dump();
  EXPECT_THAT(Error(absl::StatusCode::kUnavailable), HasSubstr("CHECK constraint failed"));
  EXPECT_EQ(Dump(), before);
  Execute("UPDATE records SET record='{}' WHERE kind='runs'");
  EXPECT_THAT(Error(absl::StatusCode::kDataLoss), HasSubstr("record 0 of runs of a/0: "));
  EXPECT_EQ(Query("PRAGMA user_version"), "5\n");
  EXPECT_EQ(Query("SELECT count(*) FROM sqlite_master WHERE type='view'"), "0\n");
}

TEST_F(Migration, WithoutRoomForACopyTheStoreStaysAsItWas) {
  Execute(Fixture(5));
  ASSERT_EQ(symlink("/dev/full", copy().c_str()), 0);
  EXPECT_THAT(Error(absl::StatusCode::kUnavailable),
              HasSubstr(absl::StrCat("cannot be copied to ", copy())));
  EXPECT_EQ(Query("PRAGMA user_version"), "5\n");
  ExpectRecords(path_);  // the next try succeeds
}

TEST_F(Migration, KilledAtAnyMomentItIsDoneOrNot) {
  std::mt19937 random(19);
  for (int i = 0; i < 20; ++i) {
    for (const char* suffix : {"", "-wal", "-shm"}) unlink((path_ + suffix).c_str());
    Execute(Fixture(5));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      _exit(OpenSqliteStore(path_).ok() ? 0 : 1);
    }
    usleep(random() % 20000);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    ExpectRecords(path_);
  }
}

TEST_F(Migration, TheSchemaVersionRisesWithEachChangeOfARecord) {
  Create();
  {
    auto store = OpenSqliteStore(path_);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->ChangeTokens({SomeToken("00000000000a"), {}}).ok());
  }
  const std::string now = Dump();
  const std::string path = path_ + ".sql";
  if (now == Fixture(7)) return;
  std::ofstream(path) << now;
  FAIL()
      << "the fields of a record, or the schema, have changed, and a store of the release before "
         "would be read wrongly. If that release is out, raise kSchemaVersion (sqlite_store.cc), "
         "add a Migration, and keep the new text, "
      << path << ", as testdata/schema_N.sql";
}

TEST_F(SqliteFile, AStateThatIsNoDigestIsRefused) {
  Create();
  Execute(
      "UPDATE records SET record=json_set(record, '$.state.state', '1234') WHERE kind='groups'");
  EXPECT_THAT(Error(absl::StatusCode::kDataLoss),
              HasSubstr("record 0 of groups of a/0: no digest at byte "));
}

TEST_F(SqliteFile, FileOfAnotherProgramIsRefusedAndUntouched) {
  Execute("CREATE TABLE precious(x)");
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition), HasSubstr("another program"));
  Execute("SELECT x FROM precious");
}

TEST_F(SqliteFile, GarbageIsRefused) {
  std::ofstream(path_) << std::string(10000, 'x');
  EXPECT_THAT(Error(absl::StatusCode::kFailedPrecondition), HasSubstr("not a database"));
}

TEST_F(SqliteFile, CorruptPagesAreRefused) {
  Create();
  Execute("PRAGMA wal_checkpoint(TRUNCATE)");
  std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4096);
  file << std::string(20000, '\x5a');
  file.close();
  EXPECT_THAT(Error(absl::StatusCode::kDataLoss), HasSubstr("corrupt"));
}

TEST_F(SqliteFile, ValuesThatNoCoordinatorWroteAreRefused) {
  const auto refuses = [this](const std::string& sql, const std::string& why) {
    Create();
    Execute(sql);
    EXPECT_THAT(Error(absl::StatusCode::kDataLoss), HasSubstr(why)) << sql;
    Execute("DELETE FROM records");
  };
  const auto set = [](const std::string& kind, const std::string& field, const std::string& value) {
    return absl::StrCat("UPDATE records SET record=json_set(record, '$.", field, "', ", value,
                        ") WHERE kind='", kind, "' AND place=0");
  };
  refuses(set("members", "peer", "'x7'"), "record 0 of members of a/0: no id at byte ");
  refuses(set("members", "peer", "7"), "record 0 of members of a/0: no '\"' at byte ");
  refuses(set("members", "departs.why", "'perhaps'"), "\"perhaps\" is no name of a value");
  refuses(set("members", "cohort_size", "4294967296"), "too large a number");
  refuses(set("members", "of_a_newer_release", "1"), "field \"of_a_newer_release\" is not known");
  refuses(set("fates", "fates[0].fate", "'maybe'"), "\"maybe\" is no name of a value");
  refuses(set("blocked", "a", "'m3'"), "record 0 of blocked of a/0: no id");
  refuses(set("runs", "secret", "'00'"),
          "record 0 of runs of a/0: secret is 1 bytes, not 32 to 32");
  ASSERT_TRUE((*OpenSqliteStore(path_))->ChangeTokens({SomeToken("00000000000a"), {}}).ok());
  refuses(set("tokens", "hash", "'00'"),
          "record 0 of tokens of 00000000000a/0: hash is 1 bytes, not 32 to 32");
  refuses(set("runs", "run", "'b'"),
          "record 0 of runs of a/0: the record names another key than its row");
  refuses("UPDATE records SET record='[]' WHERE kind='runs'", "record 0 of runs of a/0: no '{'");
  refuses("DELETE FROM records WHERE kind='runs'",
          "record 0 of groups of a/0: there is no such run");
  refuses("DELETE FROM records WHERE kind='groups'", "there is no such group");
  refuses("DELETE FROM records WHERE kind='members' AND place=1",
          "record 2 of members of a/0: the record before it is missing");
}

// A list may be longer than a message can carry. All of it has to be there after a restart.
TEST_F(SqliteFile, AListLongerThanAMessageAllowsIsReadAgain) {
  constexpr size_t kMany = control::kMissedOpsMax + 1;
  {
    auto store = OpenSqliteStore(path_);
    ASSERT_TRUE(store.ok()) << store.status();
    GroupRecord group = SomeGroup("a", 0);
    ASSERT_FALSE(group.fates.empty());
    group.fates[0].missed.clear();
    for (size_t i = 0; i < kMany; ++i) group.fates[0].missed.push_back({Epoch(1), i});
    ASSERT_TRUE((*store)->Apply({PutRun{SomeRun("a")}, PutGroup{group}}).ok());
  }
  auto store = OpenSqliteStore(path_);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto records = (*store)->Load();
  ASSERT_TRUE(records.ok()) << records.status();
  EXPECT_EQ(records->groups.at({"a", 0}).fates[0].missed.size(), kMany);
}

// A release with a new field reads what an older release wrote.
TEST_F(SqliteFile, AFieldThatIsNotThereHasItsDefault) {
  Create();
  Execute("UPDATE records SET record=json_remove(record, '$.votes') WHERE kind='members'");
  auto store = OpenSqliteStore(path_);
  ASSERT_TRUE(store.ok()) << store.status();
  const auto records = (*store)->Load();
  ASSERT_TRUE(records.ok()) << records.status();
  GroupRecord group = SomeGroup("a", 0);
  for (MemberRecord& member : group.members) member.votes = 0;
  EXPECT_EQ(records->groups.at({"a", 0}), group);
}

TEST_F(SqliteFile, UnusablePathsAreRefusedWithTheReason) {
  EXPECT_THAT(OpenError("sqlite:/nonexistent/dir/file", absl::StatusCode::kUnavailable),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(OpenError("sqlite:" + ::testing::TempDir(), absl::StatusCode::kUnavailable),
              HasSubstr("cannot open"));
}

TEST_F(SqliteFile, CanBeReadWhileTheCoordinatorWrites) {
  auto store = OpenSqliteStore(path_);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->Apply({PutRun{SomeRun("a")}, PutGroup{SomeGroup("a", 0)}}).ok());
  sqlite3* reader = nullptr;
  ASSERT_EQ(sqlite3_open_v2(path_.c_str(), &reader, SQLITE_OPEN_READONLY, nullptr), SQLITE_OK);
  sqlite3_stmt* statement = nullptr;
  ASSERT_EQ(sqlite3_prepare_v2(reader, "SELECT member FROM members ORDER BY place", -1, &statement,
                               nullptr),
            SQLITE_OK);
  ASSERT_EQ(sqlite3_step(statement), SQLITE_ROW);
  EXPECT_STREQ(reinterpret_cast<const char*>(sqlite3_column_text(statement, 0)), "m2");
  // Meanwhile the reader's transaction stays open.
  EXPECT_TRUE((*store)->Apply({PutGroup{SomeGroup("a", 1)}}).ok());
  sqlite3_finalize(statement);
  sqlite3_close(reader);
}

TEST_F(SqliteFile, IsForItsOwnerOnly) {
  Create();
  struct stat file {};
  ASSERT_EQ(stat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

// ------------------------------------------------------------------------------ kill -9

// The writer's transaction `number`. In every complete state two groups and the run have this
// number.
std::vector<Mutation> Numbered(uint64_t number) {
  RunRecord run = SomeRun("a");
  run.next_member = number;
  std::vector<Mutation> mutations = {PutRun{run}};
  for (uint32_t g = 0; g < 2; ++g) {
    GroupRecord group = SomeGroup("a", g);
    group.highest = Epoch(number);
    group.members.resize(number % 4);
    for (MemberRecord& member : group.members) member.votes = number;
    mutations.push_back(PutGroup{group});
  }
  return mutations;
}

TEST_F(SqliteFile, KilledWriterLosesNothingThatWasReportedAndTearsNoTransaction) {
  std::mt19937_64 random(7);
  uint64_t number = 0;
  for (int round = 0; round < 12; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(pipe_fds[0]);
      auto store = OpenSqliteStore(path_);
      if (!store.ok()) _exit(1);
      for (uint64_t n = number + 1;; ++n) {
        if (!(*store)->Apply(Numbered(n)).ok()) _exit(1);
        if (write(pipe_fds[1], &n, sizeof n) != sizeof n) _exit(1);
      }
    }
    close(pipe_fds[1]);
    uint64_t reported = 0;
    for (uint64_t left = random() % 40 + 1; left > 0; --left) {
      ASSERT_EQ(read(pipe_fds[0], &reported, sizeof reported), ssize_t{sizeof reported});
    }
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    for (uint64_t n; read(pipe_fds[0], &n, sizeof n) == ssize_t{sizeof n};) reported = n;
    close(pipe_fds[0]);

    auto store = OpenSqliteStore(path_);
    ASSERT_TRUE(store.ok()) << store.status();
    const auto records = (*store)->Load();
    ASSERT_TRUE(records.ok()) << records.status();
    number = records->runs.at("a").next_member;
    // The store may or may not hold the transaction that was in flight.
    EXPECT_TRUE(number == reported || number == reported + 1) << number << " " << reported;
    Records expected;
    for (const Mutation& mutation : Numbered(number)) coordinator::Apply(mutation, &expected);
    EXPECT_TRUE(*records == expected);
  }
}

}  // namespace
}  // namespace longhaul::coordinator

CREATE TABLE records(
  kind TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, place INTEGER NOT NULL,
  record TEXT NOT NULL CHECK(json_valid(record)),
  PRIMARY KEY(kind, name, number, place)) STRICT, WITHOUT ROWID;
PRAGMA application_id=1279804239;
PRAGMA user_version=7;
INSERT INTO records VALUES('blocked', 'a', 0, 0, '{"a":"p1f","b":"p20","relay":"p21","reason":"no route, 100%"}');
INSERT INTO records VALUES('blocked', 'a', 0, 1, '{"a":"p20","b":"pffffffffffffffff","relay":"p0","reason":""}');
INSERT INTO records VALUES('fates', 'a', 0, 0, '{"peer":"p1f","fates":[{"ordinal":"o3","fate":"commit"},{"ordinal":"o4","fate":"redo"}],"missed":[]}');
INSERT INTO records VALUES('fates', 'a', 0, 1, '{"peer":"p20","fates":[{"ordinal":"o18446744073709551615","fate":"abort"}],"missed":[{"boundary":2,"tag":0,"set":0,"kind":0,"step":0},{"boundary":18446744073709551615,"tag":18446744073709551615,"set":0,"kind":0,"step":0}]}');
INSERT INTO records VALUES('fates', 'a', 0, 2, '{"peer":"p21","fates":[],"missed":[{"boundary":2,"tag":7,"set":0,"kind":0,"step":0}]}');
INSERT INTO records VALUES('fates', 'a', 0, 3, '{"peer":"p22","fates":[],"missed":[]}');
INSERT INTO records VALUES('groups', 'a', 0, 0, '{"run":"a","group":0,"committed":4,"highest":6,"boundary":3,"last_freeze":4,"ballots":17,"stepped":0,"state":{"revision":18446744073709551614,"state":"0000000000000000ffffffffffffffff","manifest":"ffffffffffffffff0000000000000001","ballots":0},"sign_ops":false,"sign_ops_from":0,"barred":[]}');
INSERT INTO records VALUES('members', 'a', 0, 0, '{"member":"m2","peer":"pffffffffffffffff","request":18446744073709551615,"name":"trainer-a","joined":1,"votes":12,"syncs":18446744073709551615,"holds":false,"cohort":"host-a","cohort_size":256,"after":11,"step_deadline_ms":86400000,"background_until":3,"members":0,"named":false,"departs":{"why":"evicted","reason":"by an operator: \"x\", ''y''"}}');
INSERT INTO records VALUES('members', 'a', 0, 1, '{"member":"m1","peer":"p1f","request":9,"name":"","joined":3,"votes":0,"syncs":0,"holds":false,"cohort":"","cohort_size":0,"after":0,"step_deadline_ms":0,"background_until":18446744073709551615,"members":0,"named":false,"departs":{"why":"left","reason":""}}');
INSERT INTO records VALUES('members', 'a', 0, 2, '{"member":"m5","peer":"p20","request":1,"name":"late","joined":0,"votes":0,"syncs":0,"holds":false,"cohort":"b","cohort_size":2,"after":18446744073709551615,"step_deadline_ms":0,"background_until":0,"members":0,"named":false}');
INSERT INTO records VALUES('peers', 'a', 0, 0, '{"peer":"p1f","endpoints":["10.0.0.1:29700","[::1]:29700","odd,%2c%,name"],"lanes":16,"host":"host a, \"b\"","key":""}');
INSERT INTO records VALUES('peers', 'a', 0, 1, '{"peer":"pffffffffffffffff","endpoints":[],"lanes":0,"host":"","key":""}');
INSERT INTO records VALUES('peers', 'a', 0, 2, '{"peer":"p20","endpoints":["",""],"lanes":1,"host":"nul\u0000inside","key":""}');
INSERT INTO records VALUES('runs', 'a', 0, 0, '{"run":"a","next_member":7,"secret":"0001736563726574ff7878787878787878787878787878787878787878787878"}');
INSERT INTO records VALUES('tokens', '00000000000a', 0, 0, '{"id":"00000000000a","hash":"00ff686868686868686868686868686868686868686868686868686868686868","run":"*","role":"trainer","label":"site \"b\"","created_s":1,"expires_s":18446744073709551615,"revoked_s":3,"groups":4,"members":5,"runs":4294967295}');

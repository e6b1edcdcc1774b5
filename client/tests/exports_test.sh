# What the library shows and needs: the header's functions, the C library of 2018, and nothing else.
library=$1 header=$2

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sed 's/@.*//' | sort -u)
declared=$(grep -v '^ \*\|^/\*' "$header" | grep -o '\blh_[a-z_]*(' | tr -d '(' | sort -u)
test -n "$declared"
diff <(echo "$declared") <(echo "$exported") || { echo "header (<) and library (>) differ"; exit 1; }

unversioned=$(nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | grep -v '@@LONGHAUL_0.1$' || true)
test -z "$unversioned" || { echo "without a version: $unversioned"; exit 1; }

soname=$(readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
test "$soname" = liblonghaul.so.0 || { echo "soname is $soname"; exit 1; }

needed=$(readelf -d "$library" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p')
echo "needed:" $needed
# The loader is part of the C library: thread-local storage comes from it.
if echo "$needed" | grep -v -e '^libc\.so\.6$' -e '^ld-linux' -e '^libpthread\.so\.0$'; then
  echo "more than the C library is needed"
  exit 1
fi

newest=$(readelf -V "$library" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
echo "newest: $newest"
test "$(printf '%s\n' "$newest" GLIBC_2.27 | sort -V | tail -1)" = GLIBC_2.27 ||
  { echo "a C library newer than 2.27 is needed"; exit 1; }

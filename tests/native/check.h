// check.h: what the native tests share: checks that fail loudly, named tests, and children that are expected to die.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace check {

// Under a sanitizer the program is many times slower, and a fault ends it by a report and an exit code.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Ends the process at the first condition that does not hold; safe in a fiber and in any thread.
#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::fflush(stdout);                                                                \
      _exit(1);                                                                           \
    }                                                                                     \
  } while (false)

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
void test(const char* name, F body) {
  std::printf("%-52s", name);
  std::fflush(stdout);
  const double start = now_ms();
  body();
  std::printf(" ok %9.2f ms\n", now_ms() - start);
}

struct End {  // of a child process
  int signal = 0, code = 0;
  std::string text;  // what it wrote to stderr
  bool died() const { return signal != 0 || code != 0; }
  bool says(const char* words) const { return text.find(words) != std::string::npos; }
};

// Runs `body` in a child process that leaves no core file; a child that hangs is ended by an alarm.
template <class F>
End in_child(F body) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  std::fflush(stdout);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    alarm(60);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    body();
    _exit(0);
  }
  close(ends[1]);
  End end;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) end.text.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  if (WIFEXITED(status)) end.code = WEXITSTATUS(status);
  return end;
}

}  // namespace check

// The pool under its hard cases. Run these with ZG_SANITIZE=thread, too.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.h"
#include "refuse.h"

using namespace zg;

TEST_CASE("every piece runs once, whoever waits") {
  for (const std::size_t threads : {1, 2, 4}) {
    REQUIRE(set_pool_threads(threads).ok());
    CHECK(pool_threads() == threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> runs(100);
      const auto job = submit(runs.size(), [&](std::size_t piece) { runs[piece].fetch_add(1); });
      CHECK(job->wait().ok());
      CHECK(job->done());
      for (const auto& count : runs) CHECK(count == 1);
    }
  }
}

TEST_CASE("no more pieces at a time than threads") {
  REQUIRE(set_pool_threads(2).ok());
  std::atomic<int> now{0}, most{0};
  const auto job = submit(40, [&](std::size_t) {
    const int running = now.fetch_add(1) + 1;
    for (int seen = most; seen < running && !most.compare_exchange_weak(seen, running);) {
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    now.fetch_sub(1);
  });
  CHECK(job->wait().ok());
  CHECK(most <= 2);
}

TEST_CASE("a piece that gets no memory fails its job, and nothing else") {
  REQUIRE(set_pool_threads(2).ok());
  REQUIRE(pool_threads() == 2);  // which starts them
  const RefuseMemory refuse;
  const auto job = submit(4, [](std::size_t piece) { std::vector<int>(1000 + piece).at(0) = 1; });
  while (!job->done()) std::this_thread::yield();
  CHECK(job->wait().text == "a thread of the pool failed: std::bad_alloc");
}

TEST_CASE("work goes on while nobody waits") {
  REQUIRE(set_pool_threads(1).ok());
  std::atomic<int> count{0};
  const auto job = submit(10, [&](std::size_t) { count.fetch_add(1); });
  while (!job->done()) std::this_thread::yield();
  CHECK(count == 10);
}

TEST_CASE("many threads submit and wait") {
  REQUIRE(set_pool_threads(3).ok());
  std::atomic<int> count{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        const auto first = submit(7, [&](std::size_t) { count.fetch_add(1); });
        const auto second = submit(3, [&](std::size_t) { count.fetch_add(1); });
        CHECK(second->wait().ok());
        CHECK(first->wait().ok());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(count == 6 * 100 * 10);
}

TEST_CASE("an exception becomes the job's status, and the pool lives on") {
  REQUIRE(set_pool_threads(2).ok());
  const auto job = submit(8, [](std::size_t piece) {
    if (piece == 3) throw std::runtime_error("piece three");
  });
  const Status status = job->wait();
  CHECK(status.code == Code::internal);
  CHECK(status.text.find("piece three") != std::string::npos);
  CHECK(run_pieces(8, [](std::size_t) {}).ok());
}

TEST_CASE("closing finishes what was submitted, whoever helps meanwhile") {
  for (int round = 0; round < 20; ++round) {
    REQUIRE(set_pool_threads(2).ok());
    std::atomic<int> count{0};
    std::vector<std::shared_ptr<Job>> jobs;
    for (int i = 0; i < 5; ++i) jobs.push_back(submit(20, [&](std::size_t) { count.fetch_add(1); }));
    std::thread waiter([&] { CHECK(jobs.back()->wait().ok()); });
    std::thread submitter([&] { CHECK(run_pieces(20, [&](std::size_t) { count.fetch_add(1); }).ok()); });
    close_pool();
    for (const auto& job : jobs) CHECK(job->done());
    waiter.join();
    submitter.join();
    CHECK(count == 120);
  }
}

TEST_CASE("a pool that was closed does the work at once") {
  const auto pool = std::make_shared<Pool>(2, std::vector<int>{});
  pool->close();
  int count = 0;
  CHECK(pool->submit(5, [&](std::size_t) { ++count; })->done());
  CHECK(count == 5);
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of many threads
TEST_CASE("a fork while work is in flight") {
  REQUIRE(set_pool_threads(2).ok());
  for (int round = 0; round < 20; ++round) {
    const auto job = submit(50, [](std::size_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); });
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      std::atomic<int> count{0};
      const bool over = !job->wait().ok();
      const bool works = run_pieces(9, [&](std::size_t) { count.fetch_add(1); }).ok() && count == 9;
      close_pool();
      _exit(over && works ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    CHECK(job->wait().ok());
  }
}
#endif

TEST_CASE("numbers of threads that make no sense") {
  CHECK(set_pool_threads(0).code == Code::invalid);
  CHECK(set_pool_threads(100000).code == Code::invalid);
}

"use strict";
(() => {
  const player = document.getElementById("player");
  if (!player) return;
  const reels = [...player.querySelectorAll(".reel")];
  const buttons = [...player.querySelectorAll("[data-reel]")];
  const play = document.getElementById("play");
  const scrub = document.getElementById("scrub");
  const shown = document.getElementById("frame");
  const differ = document.getElementById("differ");
  let current = 0;
  let playing = false;

  const all = () => [...reels[current].querySelectorAll("video")];
  const master = () => all()[0];
  const rate = () => Number(reels[current].dataset.rate);
  const last = () => Number(reels[current].dataset.frames) - 1;
  // The middle of a frame's time: no rounding can show its neighbour.
  const middle = (frame) => (frame + 0.5) / rate();
  const frameNow = () => Math.min(last(), Math.max(0, Math.floor(master().currentTime * rate() + 1e-3)));

  function label(frame) {
    scrub.value = String(frame);
    shown.textContent = `${frame + 1} / ${last() + 1}`;
    player.dispatchEvent(new Event("frame"));
  }

  function seek(frame) {
    const wanted = Math.min(last(), Math.max(0, frame));
    for (const video of all()) video.currentTime = middle(wanted);
    label(wanted);
  }

  function pause() {
    playing = false;
    for (const video of all()) video.pause();
    play.textContent = "▶";
    play.setAttribute("aria-label", "Play");
  }

  function stop() {
    pause();
    seek(frameNow());
  }

  function start() {
    if (frameNow() >= last()) seek(0);
    playing = true;
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Pause");
    for (const video of all()) video.play().catch(pause);
    requestAnimationFrame(follow);
  }

  // Browsers start videos one after the other; whoever strays by most of a frame is put back.
  function follow() {
    if (!playing) return;
    const lead = master();
    if (lead.ended || frameNow() >= last()) {
      for (const video of all()) video.currentTime = 0;
      for (const video of all()) video.play().catch(pause);
    } else {
      for (const video of all()) {
        if (Math.abs(video.currentTime - lead.currentTime) > 0.6 / rate()) video.currentTime = lead.currentTime;
      }
    }
    label(frameNow());
    requestAnimationFrame(follow);
  }

  function showDifference() {
    for (const screen of player.querySelectorAll(".screen")) {
      const difference = screen.querySelector(".difference");
      if (!difference) continue;
      difference.hidden = !differ.checked;
      screen.querySelector(".plain").hidden = differ.checked;
    }
    player.dispatchEvent(new Event("frame"));
  }

  function choose(index) {
    const again = playing;
    pause();
    current = (index + reels.length) % reels.length;
    reels.forEach((reel, i) => { reel.hidden = i !== current; });
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === current)));
    scrub.max = String(last());
    player.dispatchEvent(new Event("scene"));
    seek(0);
    if (again) start();
  }

  for (const video of player.querySelectorAll("video")) video.removeAttribute("controls");
  buttons.forEach((button, index) => button.addEventListener("click", () => choose(index)));
  play.addEventListener("click", () => (playing ? stop() : start()));
  scrub.addEventListener("input", () => { pause(); seek(Number(scrub.value)); });
  differ.addEventListener("change", showDifference);
  player.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest(".wipe")) return;  // arrows move the dividing line there
    const onButton = event.target instanceof HTMLButtonElement || event.target === differ;
    const actions = {
      " ": () => (playing ? stop() : start()),
      ArrowLeft: () => { pause(); seek(frameNow() - 1); },
      ArrowRight: () => { pause(); seek(frameNow() + 1); },
      Home: () => { pause(); seek(0); },
      End: () => { pause(); seek(last()); },
      d: () => { differ.checked = !differ.checked; showDifference(); },
      n: () => choose(current + 1),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || (event.key === " " && onButton)) return;
    event.preventDefault();
    action();
  });
  choose(0);

  const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!still && "IntersectionObserver" in window) {
    const watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); if (!playing) start(); }
    }, { threshold: 0.4 });
    watcher.observe(player);
  }
})();

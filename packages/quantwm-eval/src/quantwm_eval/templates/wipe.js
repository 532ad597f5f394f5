"use strict";
// Two of the videos in one picture, divided by a line that can be moved.
(() => {
  const player = document.getElementById("player");
  if (!player) return;
  const canvas = document.getElementById("both");
  const split = document.getElementById("split");
  const sides = [document.getElementById("left"), document.getElementById("right")];
  const pen = canvas.getContext("2d");

  const figures = () => [...player.querySelectorAll(".reel:not([hidden]) figure")];
  const video = (figure) => figure.querySelector("video:not([hidden])");

  // The same two methods in every scene; at first BF16, or the truth, against the last one.
  function fill() {
    const labels = figures().map((figure) => figure.querySelector("figcaption").textContent);
    sides.forEach((side, index) => {
      const wanted = labels.includes(side.value) ? side.value : labels[index ? labels.length - 1 : Math.min(1, labels.length - 1)];
      side.replaceChildren(...labels.map((label) => new Option(label, label, false, label === wanted)));
    });
    draw();
  }

  function draw() {
    const shown = figures();
    const chosen = sides.map((side) => shown[side.selectedIndex]).filter(Boolean).map(video);
    if (chosen.length < 2 || chosen.some((each) => each.readyState < 2)) return;
    canvas.width = chosen[0].videoWidth;
    canvas.height = chosen[0].videoHeight;
    const edge = Math.round((canvas.width * Number(split.value)) / 100);
    pen.drawImage(chosen[1], 0, 0);
    if (edge > 0) pen.drawImage(chosen[0], 0, 0, edge, canvas.height, 0, 0, edge, canvas.height);
    pen.fillStyle = "#fff";
    pen.fillRect(edge - 1, 0, 2, canvas.height);
  }

  function drag(event) {
    if (!event.buttons) return;
    const box = canvas.getBoundingClientRect();
    split.value = String((100 * (event.clientX - box.left)) / box.width);
    draw();
  }

  for (const input of [split, ...sides]) input.addEventListener("input", draw);
  for (const name of ["pointerdown", "pointermove"]) canvas.addEventListener(name, drag);
  for (const name of ["seeked", "loadeddata"]) player.addEventListener(name, draw, true);  // media events do not bubble
  player.addEventListener("scene", fill);
  player.addEventListener("frame", draw);
  fill();
})();

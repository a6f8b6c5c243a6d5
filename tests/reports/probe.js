// Runs inside a report, in a test: what does a reader's browser make of it?
"use strict";
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("load", () => {
  const folded = () => document.querySelectorAll("details:not([open])").length;
  const print = [folded()];
  for (const moment of ["beforeprint", "afterprint"]) {
    dispatchEvent(new Event(moment));
    print.push(folded());
  }
  document.querySelectorAll("details").forEach((each) => { each.open = true; });

  // Every piece of text as boxes, cut to what its scrolling ancestors show.
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement;
    if (!node.data.trim() || !owner.checkVisibility() || owner.closest("script, style, title, desc")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      let { left, top, right, bottom } = box;
      for (let up = owner; up; up = up.parentElement) {
        if (up.tagName === "svg" || getComputedStyle(up).overflowX === "visible") continue;
        const clip = up.getBoundingClientRect();
        left = Math.max(left, clip.left); right = Math.min(right, clip.right);
      }
      if (right - left > 1 && bottom - top > 1) boxes.push({ left, top, right, bottom, node, text: node.data.trim().slice(0, 40) });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  const overlaps = [];
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - 3; j++) {
      const b = boxes[j];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 && a.node !== b.node) overlaps.push([a.text, b.text]);
    }
  });

  const table = document.getElementById("comparison");
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.textContent === "accuracy");
  const button = heads[column].querySelector("button");
  const state = [];
  button.click();
  const accuracy = [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.value).filter(Boolean).map(Number);
  state.push(heads[column].getAttribute("aria-sort"));
  button.click();
  state.push(heads[column].getAttribute("aria-sort"), heads[column + 1].getAttribute("aria-sort"));

  const slider = document.getElementById("iteration");
  const moved = [slider.min, slider.max].map((value) => {
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
    const visible = [...document.querySelectorAll(".frames .shot")].filter((shot) => shot.checkVisibility());
    return { shown: document.getElementById("iteration-shown").textContent, at: visible.map((shot) => Number(shot.dataset.at)) };
  });

  const requests = performance.getEntriesByType("resource").map((each) => each.name).filter((name) => !name.startsWith("data:"));
  const found = {
    errors, requests, overlaps, texts: boxes.length, width: innerWidth, scrollWidth: document.documentElement.scrollWidth,
    sorted: { accuracy, state }, slider: moved, print,
  };
  parent.postMessage(JSON.stringify(found), "*");
});

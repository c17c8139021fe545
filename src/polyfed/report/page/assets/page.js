"use strict";
// Choices between panels, lines to show, and values on hover. Without it the page shows everything it has.
(() => {
  document.documentElement.classList.add("js");
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip" }));
  tip.setAttribute("aria-live", "polite");

  // -- options and ids such as --tune and fold-1: a line ends before them and not at their hyphens
  const hyphenated = /[\w-]-\w/;
  for (const part of document.querySelectorAll("h1,p,li,dd")) {
    for (const text of [...part.childNodes].filter((node) => node.nodeType === 3 && hyphenated.test(node.data))) {
      text.replaceWith(...text.data.split(/(\s+)/).map((word) => hyphenated.test(word)
        ? Object.assign(document.createElement("span"), { className: "uncut", textContent: word }) : word));
    }
  }

  // -- choices
  const choose = (control) => {
    const name = control.name || control.id;
    for (const panel of document.querySelectorAll(".panel")) {
      if (panel.dataset.of === name) panel.classList.toggle("off", panel.dataset.value !== control.value);
    }
  };
  for (const control of document.querySelectorAll("[data-choose]")) {
    control.addEventListener("change", () => choose(control));
    if (control.type !== "radio" || control.checked) choose(control); // what the browser kept over a reload
  }
  const hidden = (box, at) => {
    const input = document.getElementById(`${box}-${at}`);
    return input !== null && !input.checked;
  };
  for (const input of document.querySelectorAll("[data-lines]")) {
    const show = () => {
      for (const chart of document.querySelectorAll(`[data-chart="${input.dataset.lines}"]`)) {
        for (const line of chart.querySelectorAll(`[data-line="${input.value}"]`)) line.classList.toggle("hidden", !input.checked);
      }
    };
    input.addEventListener("change", show);
    show();
  }

  for (const table of document.querySelectorAll(".answers")) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "csv", textContent: "Show the sentences" });
    button.addEventListener("click", () => {
      button.textContent = table.classList.toggle("told") ? "Hide the sentences" : "Show the sentences";
    });
    table.closest(".wide").after(button);
  }

  // -- values
  const hide = () => {
    tip.style.visibility = "hidden";
    for (const cross of document.querySelectorAll(".cross")) cross.style.visibility = "hidden";
  };
  const tell = (text, x, y) => {
    if (tip.textContent !== text) tip.textContent = text;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
    tip.style.top = `${y + height + 22 > innerHeight ? Math.max(4, y - height - 12) : y + 16}px`;
    tip.style.visibility = "visible";
  };
  const told = (value, unit) => {
    const text = unit === "%" ? `${(100 * value).toFixed(1)} %` : value.toFixed(3);
    return text.replace("-", "−");
  };
  const short = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
  // Which rounds a chart has values of, over all lines that are shown, in its own axis.
  const places = (chart) => {
    const { lines } = data[chart.dataset.chart];
    const found = lines.filter((_, at) => !hidden(chart.dataset.chart, at)).flatMap((line) => line[chart.dataset.axis]);
    return [...new Set(found.filter((x) => x !== null))].sort((a, b) => a - b);
  };
  const point = (chart, x) => {
    const svg = chart.querySelector("svg"), { unit, up, lines } = data[chart.dataset.chart], axis = chart.dataset.axis;
    const [left, right, , , x0, x1] = svg.dataset.box.split(" ").map(Number);
    const rows = [];
    lines.forEach((line, at) => {
      if (hidden(chart.dataset.chart, at)) return;
      let best = -1;
      line[axis].forEach((value, k) => {
        if (value === null || line.mean[k] === null) return;
        if (best < 0 || Math.abs(value - x) <= Math.abs(line[axis][best] - x)) best = k;
      });
      if (best < 0) return;
      const spread = line.low[best] === line.high[best] ? "" : ` (${told(line.low[best], unit)} to ${told(line.high[best], unit)})`;
      const where = axis === "rounds" ? (line.rounds[best] === x ? "" : `, round ${line.rounds[best]}`)
        : `, ${short(line[axis][best])} ${axis === "seconds" ? "s" : "MB"}`;
      rows.push([line.mean[best], `${line.label}: ${told(line.mean[best], unit)}${spread}${where}`]);
    });
    if (!rows.length) return hide();
    rows.sort((a, b) => (up === false ? a[0] - b[0] : b[0] - a[0])); // the best first
    const at = left + ((x - x0) / (x1 - x0)) * (right - left), cross = svg.querySelector(".cross");
    cross.setAttribute("transform", `translate(${at} 0)`);
    cross.style.visibility = "visible";
    const frame = svg.getBoundingClientRect();
    const heading = axis === "rounds" ? `round ${x}` : `near ${short(x)} ${axis === "seconds" ? "s" : "MB"}`;
    const shown = rows.slice(0, 12).map((row) => row[1]);
    if (rows.length > 12) shown.push(`and ${rows.length - 12} more`);
    tell([heading, ...shown].join("\n"), frame.left + (at / svg.viewBox.baseVal.width) * frame.width, frame.top + 30);
  };
  for (const chart of document.querySelectorAll("[data-chart]")) {
    const svg = chart.querySelector("svg[data-box]");
    if (!svg) continue;
    const [left, right, , , x0, x1] = svg.dataset.box.split(" ").map(Number);
    const nearest = (x) => places(chart).reduce((best, p) => (best === null || Math.abs(p - x) < Math.abs(best - x) ? p : best), null);
    let at = null;
    const go = (x) => { if (x !== null) point(chart, (at = x)); };
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect(), unit = svg.viewBox.baseVal.width / frame.width;
      go(nearest(x0 + (((event.clientX - frame.left) * unit - left) / (right - left)) * (x1 - x0)));
    });
    svg.addEventListener("pointerleave", hide);
    chart.addEventListener("focus", () => { if (chart.matches(":focus-visible")) go(at ?? places(chart).at(-1) ?? null); });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") return hide();
      if (!step) return;
      event.preventDefault();
      const known = places(chart), now = known.indexOf(at);
      if (known.length) go(known[Math.max(0, Math.min(known.length - 1, now < 0 ? known.length - 1 : now + step))]);
    });
  }
  for (const kind of ["pointerover", "pointerdown"]) {
    document.addEventListener(kind, (event) => {
      const mark = event.target.closest?.("[data-t]");
      if (mark) tell(mark.dataset.t || mark.querySelector(".say").textContent, event.clientX, event.clientY);
      else if (!event.target.closest?.("[data-box]")) hide();
    });
  }
  addEventListener("scroll", hide, { passive: true });
})();

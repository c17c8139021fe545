"use strict";
// Curves and counts of the chosen site, method, class and threshold, as curves.py and confusion.py draw the first of them.
(() => {
  const LEFT = 50, RIGHT = 22, TOP = 10, BOTTOM = 44, HEIGHT = 384, WIDTH = 420;
  const COLOURS = 8;
  const place = (x, y) => `${(LEFT + x * (WIDTH - LEFT - RIGHT)).toFixed(1)} ${(HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)).toFixed(1)}`;
  const percent = (share) => (100 * share).toFixed(1);
  const amount = (value) => {
    const found = Math.round(value * 10) / 10;
    return Number.isInteger(found) ? found.toFixed(0) : found.toFixed(1);
  };
  // Texts of people go through textContent alone, so that none of them is read as HTML.
  const make = (name, attributes = {}, ...inside) => {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...inside);
    return found;
  };
  const draw = (name, attributes, ...inside) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...inside);
    return found;
  };
  const style = (number) => `s${number % COLOURS} d${Math.floor(number / COLOURS) % 3}`;
  const swatch = (number) => draw("svg", { class: `swatch ${style(number)}`, viewBox: "0 0 26 12", "aria-hidden": "true" },
    draw("path", { class: "line", d: "M1 6H25" }));
  const table = (caption, columns, rows, kind = "") => {
    const head = make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name))));
    const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, row[0]),
      ...row.slice(1).map((cell) => (cell instanceof Node ? cell : make("td", {}, cell))))));
    const told = make("table", kind ? { class: kind } : {}, head, body);
    return [make("p", { class: "caption" }, caption),
      make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, told)];
  };
  const bold = (text) => make("td", {}, make("b", {}, text));

  for (const box of document.querySelectorAll("[data-curves]")) {
    const told = JSON.parse(document.getElementById(box.dataset.curves).textContent);
    const pick = (of) => box.querySelector(`[data-pick=${of}]`);
    const at = (of) => Number(pick(of)?.value ?? 0);
    const grid = told.cells.flat(2).find((one) => one?.roc)?.roc.map((_, k, all) => k / (all.length - 1)) ?? [];
    const share = (hits, examples, units = 1) => {  // intervals count groups, such as patients
      if (examples <= 0) return "–";
      const z2 = told.z ** 2 / units;
      const p = hits / examples, middle = (p + z2 / (2 * examples)) / (1 + z2 / examples);
      const half = Math.sqrt(z2 * ((p * (1 - p)) / examples + z2 / (4 * examples ** 2))) / (1 + z2 / examples);
      return `${percent(p)} % (${percent(Math.max(0, middle - half))} to ${percent(Math.min(1, middle + half))} %)`;
    };

    const slots = () => {
      const chosen = [at("method")];
      if (told.reference >= 0 && told.reference !== chosen[0]) chosen.push(told.reference);
      return chosen.map((m) => ({ m, name: told.methods[m], style: told.styles[m], one: told.cells[at("site")][at("class")][m] }))
        .filter((slot) => slot.one);
    };
    const fill = (of, groups, texts, shown) => {
      const svg = box.querySelector(`[data-frame=${of}]`);
      if (!svg) return;
      for (const old of svg.querySelectorAll("[data-slot]")) old.remove();
      svg.append(...groups);
      if (!groups.some((group) => group.children.length)) {
        const text = draw("text", { "data-slot": 0, x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT / 2, "text-anchor": "middle" });
        text.textContent = "Nothing to draw";
        svg.append(text);
      }
      box.querySelector(`[data-legend=${of}]`).replaceChildren(...texts.map(([number, text]) => make("span", {}, swatch(number), text)));
      const numbers = box.querySelector(`[data-numbers=${of}]`);
      for (const old of numbers.querySelectorAll(".caption, .wide, .csv")) old.remove();
      numbers.append(...shown);
    };
    const interval = `${+(100 * told.level).toPrecision(6)} % interval`;

    const roc = (found, k) => {
      const groups = found.map(({ one, style: number }, slot) => {
        const group = draw("g", { "data-slot": slot, class: style(number) });
        if (!one.roc) return group;
        if (one.low) {
          const back = grid.map((x, j) => place(x, one.low[j])).reverse();
          group.append(draw("path", { class: "band", d: `M${[...grid.map((x, j) => place(x, one.high[j])), ...back].join("L")}Z` }));
        }
        group.append(draw("path", { class: "line", d: `M${[place(0, 0), ...grid.map((x, j) => place(x, one.roc[j]))].join("L")}` }));
        if (one.hits) {
          const [x, y] = place(one.alarms[k] / (one.n - one.yes), one.hits[k] / one.yes).split(" ");
          group.append(draw("circle", { cx: x, cy: y, r: 4.5 }));
        }
        return group;
      });
      const texts = found.map(({ one, name, style: number }) => [number, one.area
        ? `${name}: AUC ${one.area[0].toFixed(3)} (${interval} ${one.area[1].toFixed(3)} to ${one.area[2].toFixed(3)})`
        : `${name}: no curve, since all test examples are of one class`]);
      const rows = found.map(({ one, name }) => [name, ...[0.05, 0.1, 0.2].map((x) =>
        (one.roc ? `${percent(one.roc[Math.round(x * (grid.length - 1))])} %` : "–"))]);
      fill("roc", groups, texts, table("ROC curve", ["method", ...[95, 90, 80].map((p) => `sensitivity at ${p} % specificity`)], rows));
    };

    const calibration = (found) => {
      const groups = found.map(({ one, name, style: number }, slot) => {
        const group = draw("g", { "data-slot": slot, class: `mark ${style(number)}` });
        if (one.groups.length) group.append(draw("path", { class: "line", d: `M${one.groups.map((g) => place(g[0], g[1])).join("L")}` }));
        for (const [predicted, observed, low, high, examples] of one.groups) {
          const [x, y] = place(predicted, observed).split(" ");
          const text = `${name}: predicted ${percent(predicted)} %, observed ${percent(observed)} % of ${amount(examples)}`;
          group.append(draw("g", { "data-t": text },
            draw("path", { class: "line thin", d: `M${place(predicted, low)}L${place(predicted, high)}` }),
            draw("circle", { cx: x, cy: y, r: 4 })));
        }
        return group;
      });
      const rows = found.flatMap(({ one, name }) => one.groups.map((g) => [name, `${percent(g[0])} %`, `${percent(g[1])} %`,
        `${percent(g[2])} to ${percent(g[3])} %`, amount(g[4])]));
      const texts = found.map(({ one, name, style: number }) =>
        [number, one.groups.length ? name : `${name}: no curve, since there are fewer than 20 test examples`]);
      fill("cal", groups, texts, table("Calibration", ["method", "predicted", "observed", "interval", "test examples"], rows));
    };

    const thresholds = (found, k) => {
      const yes = told.classes[at("class")], other = told.others || `not ${yes}`;
      const each = found.map(({ one, name }) => {
        const hits = one.hits[k], alarms = one.alarms[k], no = one.n - one.yes;
        return make("div", {}, ...table(`${name}: test examples`, ["", `predicted ${yes}`, `predicted ${other}`, "all"], [
          [`actual ${yes}`, bold(amount(hits)), amount(one.yes - hits), amount(one.yes)],
          [`actual ${other}`, amount(alarms), bold(amount(no - alarms)), amount(no)]]));
      });
      const measures = found.map(({ one }) => {
        const hits = one.hits[k], alarms = one.alarms[k], no = one.n - one.yes, right = no - alarms;
        return [[hits, one.yes], [right, no], [hits, hits + alarms], [right, right + one.yes - hits]];
      });
      const texts = [`sensitivity: of the actual ${yes}, predicted so`, `specificity: of the actual ${other}, predicted so`,
        `positive predictive value: of the predicted ${yes}, actually so`, `negative predictive value: of the predicted ${other}, actually so`];
      const rows = texts.map((text, j) => [text, ...measures.map((one, m) => share(...one[j], found[m].one.units))]);
      return [make("div", { class: "sideways" }, ...each),
        ...table("Shares at this threshold", ["", ...found.map(({ name }) => name)], rows)];
    };

    const matrix = ({ m, name }) => {
      const counts = told.matrices[at("site")][m];
      const rows = counts.map((row, k) => {
        const whole = row.reduce((a, b) => a + b, 0);
        return [`actual ${told.names[k]}`, ...row.map((value, j) => {
          const cell = j === k ? bold(amount(value)) : make("td", {}, amount(value));
          cell.style.setProperty("--share", `${whole ? Math.round((100 * value) / whole) : 0}%`);
          return cell;
        }), amount(whole)];
      });
      const right = counts.reduce((sum, row, k) => sum + row[k], 0), all = counts.flat().reduce((a, b) => a + b, 0);
      return table(`${name}: ${amount(right)} of ${amount(all)} test examples are predicted correctly`,
        ["", ...told.names.map((one) => `predicted ${one}`), "all"], rows, "matrix");
    };

    const show = () => {
      const found = slots(), k = (Number(pick("at")?.value) || 50) - 1;
      const first = found[0]?.one, site = told.sites[at("site")];
      box.querySelector(".basis").textContent = first
        ? `${site}: ${amount(first.n)} test examples, ${amount(first.yes)} of them ${told.classes[at("class")]}.`
        : `${site}: no test examples.`;
      roc(found, k);
      calibration(found);
      const counts = box.querySelector("[data-counts]");
      if (counts) counts.replaceChildren(...(told.matrices ? found.flatMap(matrix) : found.length ? thresholds(found, k) : []));
      const output = box.querySelector("output");
      if (output) output.textContent = `${k + 1} %`;
      for (const one of box.querySelectorAll("[data-named]")) one.textContent = told.classes[at("class")];
      document.dispatchEvent(new Event("drawn"));
    };
    for (const control of box.querySelectorAll("[data-pick]")) for (const kind of ["input", "change"]) control.addEventListener(kind, show);
    show(); // what the browser kept over a reload
  }
})();

// The read-out under the pointer. The page is complete without it.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const show = (v) => v === null ? "-" :
  v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(2) : String(+v.toPrecision(4));

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = data.charts[figure.dataset.chart];
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const outputs = figure.querySelectorAll("output"), at = figure.querySelector(".at");
  const first = +svg.dataset.first, last = +svg.dataset.last;
  const read = (step) => {
    cursor.setAttribute("x1", data.left + (step - first) / (last - first) * (data.right - data.left));
    cursor.setAttribute("x2", cursor.getAttribute("x1"));
    at.textContent = "rollout " + step;
    chart.lines.forEach((line, i) => {
      const n = line.steps.indexOf(step);
      outputs[i].textContent = n < 0 ? "" : show(line.values[n]);
    });
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.width;
    const wanted = first + (x - data.left) / (data.right - data.left) * (last - first);
    let best = chart.steps[0];
    for (const step of chart.steps) if (Math.abs(step - wanted) < Math.abs(best - wanted)) best = step;
    read(best);
  });
  read(chart.steps[chart.steps.length - 1]);
}
document.documentElement.dataset.ready = document.querySelectorAll("figure[data-chart]").length;

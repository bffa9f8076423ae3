"use strict";
// Renders openapi.json. Everything is put in as text, never as markup.

const make = (tag, text, ...children) => {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
};

const resolve = (spec, schema) => {
  const ref = schema && schema.$ref;
  return ref ? ref.split("/").slice(1).reduce((at, key) => at[key], spec) : schema || {};
};

const typeName = (spec, schema, depth = 0) => {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" | ");
  const options = schema.anyOf || schema.oneOf;
  if (options) return depth > 3 ? "..." : [...new Set(options.map((o) => typeName(spec, o, depth + 1)))].join(" | ");
  if (schema.type === "array") return `[${typeName(spec, schema.items, depth + 1)}]`;
  return schema.type || "any";
};

const limits = (schema) => {
  const shown = { minimum: ">=", maximum: "<=", exclusiveMinimum: ">", maxLength: "length <=", maxItems: "items <=" };
  const all = [schema, ...(schema.anyOf || [])];
  return Object.entries(shown)
    .flatMap(([key, sign]) => all.filter((s) => s[key] !== undefined).slice(0, 1).map((s) => `${sign} ${s[key]}`))
    .join(", ");
};

const fieldTable = (spec, schema) => {
  const object = resolve(spec, schema);
  const table = make("table");
  for (const [name, field] of Object.entries(object.properties || {})) {
    const required = (object.required || []).includes(name) ? " (required)" : "";
    const value = field.default === undefined || field.default === null ? "" : `default ${JSON.stringify(field.default)}`;
    const notes = [field.description, limits(field), value].filter(Boolean).join("; ");
    table.append(make("tr", "", make("td", name + required), make("td", typeName(spec, field)), make("td", notes)));
  }
  return table;
};

const tryOut = (path, method, body) => {
  const box = make("div");
  const input = make("textarea");
  input.value = body ? "{}" : "";
  const address = make("input");
  address.value = path;
  const button = make("button", `Send ${method}`);
  const output = make("pre", "");
  button.onclick = async () => {
    const headers = { "Content-Type": "application/json" };
    const key = document.getElementById("key").value;
    if (key) headers.Authorization = `Bearer ${key}`;
    output.textContent = "...";
    try {
      const options = body ? { method, headers, body: input.value } : { method, headers };
      const response = await fetch(address.value.replace(/^\//, ""), options);
      output.textContent = `${response.status}\n`;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        output.textContent += value;
      }
    } catch (error) {
      output.textContent += String(error);
    }
  };
  box.append(make("h4", "Try it"), address, button);
  if (body) box.append(input);
  box.append(output);
  return box;
};

const operationBox = (spec, path, method, operation) => {
  const details = make("details");
  const title = make("summary", "", make("span", method.toUpperCase()), make("code", path));
  title.firstChild.className = "method";
  title.append(make("span", `  ${operation.summary || ""}`));
  details.append(title);
  details.dataset.text = `${path} ${operation.summary} ${JSON.stringify(operation.requestBody || "")}`.toLowerCase();
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("div")) return;
    const inner = make("div");
    const schema = operation.requestBody?.content?.["application/json"]?.schema;
    if (operation.parameters) {
      inner.append(make("h4", "Parameters"));
      const properties = Object.fromEntries(operation.parameters.map((p) => [p.name, p.schema]));
      inner.append(fieldTable(spec, { properties }));
    }
    if (schema) inner.append(make("h4", "Body"), fieldTable(spec, schema));
    inner.append(make("h4", "Answers"));
    const answers = make("table");
    for (const [status, answer] of Object.entries(operation.responses)) {
      const kinds = Object.entries(answer.content || {}).map(([kind, c]) => `${kind}: ${typeName(spec, c.schema)}`);
      answers.append(make("tr", "", make("td", status), make("td", answer.description), make("td", kinds.join(", "))));
    }
    inner.append(answers, tryOut(path, method.toUpperCase(), schema));
    details.append(inner);
  });
  return details;
};

const show = (spec) => {
  document.getElementById("title").textContent = `${spec.info.title} ${spec.info.version}: routes`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operationBox(spec, path, method, operation));
    }
  }
  const routes = document.getElementById("routes");
  routes.replaceChildren();
  for (const [tag, boxes] of groups) routes.append(make("h2", tag), ...boxes);
  document.getElementById("find").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const box of routes.querySelectorAll("details")) box.hidden = !box.dataset.text.includes(wanted);
  });
};

fetch("openapi.json").then((response) => response.json()).then(show, (error) => {
  document.getElementById("routes").textContent = String(error);
});

// Settings of answers. An empty field leaves the choice to the server.
import { useState } from "preact/hooks";
import { Field } from "../parts/controls";
import type { Settings } from "./model";
import { faults } from "./request";

interface Props {
  settings: Settings;
  models: string[];
  onChange: (settings: Settings) => void;
  onReset: () => void;
}

const SAMPLING: [keyof Settings, string, string][] = [
  ["temperature", "Temperature", "0 always takes the likeliest token"],
  ["top_p", "Top p", "1 keeps all"],
  ["top_k", "Top k", "-1 keeps all"],
  ["min_p", "Min p", "of the likeliest"],
  ["max_tokens", "Longest answer", "tokens"],
  ["seed", "Seed", "for the same answer again"],
];
const PENALTIES: [keyof Settings, string, string][] = [
  ["repetition_penalty", "Repetition", "1 is none"],
  ["presence_penalty", "Presence", "0 is none"],
  ["frequency_penalty", "Frequency", "0 is none"],
];

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": { "type": "string" },
    "age": { "type": "integer" }
  },
  "required": ["name", "age"]
}`;
const TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "Weather of a city",
      "parameters": {
        "type": "object",
        "properties": { "city": { "type": "string" } },
        "required": ["city"]
      }
    }
  }
]`;

export function SettingsForm({ settings, models, onChange, onReset }: Props) {
  const [touched, setTouched] = useState<Set<keyof Settings>>(new Set());
  const wrong = new Map(faults(settings).map(({ field, message }) => [field, message]));
  const set = (name: keyof Settings, value: string | boolean) => {
    setTouched((old) => new Set(old).add(name));
    onChange({ ...settings, [name]: value });
  };
  const fault = (name: keyof Settings) => (touched.has(name) ? wrong.get(name) : undefined);
  const numbers = (rows: [keyof Settings, string, string][]) =>
    rows.map(([name, label, hint]) => (
      <Field id={`set-${name}`} label={label} hint={hint} error={fault(name)}>
        <input
          id={`set-${name}`}
          type="text"
          inputMode="decimal"
          placeholder="default"
          autocomplete="off"
          aria-invalid={!!fault(name)}
          aria-describedby={`set-${name}-note`}
          value={settings[name] as string}
          onInput={(event) => set(name, event.currentTarget.value)}
        />
      </Field>
    ));
  const area = (name: keyof Settings, label: string, hint: string, rows: number, code = false) => (
    <Field id={`set-${name}`} label={label} hint={hint} error={fault(name)}>
      <textarea
        id={`set-${name}`}
        rows={rows}
        class={code ? "mono" : ""}
        spellcheck={!code}
        aria-invalid={!!fault(name)}
        aria-describedby={`set-${name}-note`}
        value={settings[name] as string}
        onInput={(event) => set(name, event.currentTarget.value)}
      />
    </Field>
  );
  return (
    <form class="settings" onSubmit={(event) => event.preventDefault()}>
      {models.length > 1 && (
        <Field id="set-model" label="Model">
          <select id="set-model" value={settings.model || models[0]} onChange={(event) => set("model", event.currentTarget.value)}>
            {models.map((name) => (
              <option value={name}>{name}</option>
            ))}
          </select>
        </Field>
      )}
      {area("system", "System prompt", "Sent before the conversation.", 3)}
      <fieldset>
        <legend>Sampling</legend>
        <div class="grid-2">{numbers(SAMPLING)}</div>
      </fieldset>
      <fieldset>
        <legend>Form of the answer</legend>
        <Field id="set-format" label="Answer as">
          <select id="set-format" value={settings.format} onChange={(event) => set("format", event.currentTarget.value)}>
            <option value="">free text</option>
            <option value="json_object">any JSON object</option>
            <option value="json_schema">JSON of a schema</option>
            <option value="regex">a regular expression</option>
          </select>
        </Field>
        {settings.format === "json_schema" && (
          <>
            {area("schema", "JSON schema", "The answer follows it, token by token.", 8, true)}
            <Example onClick={() => set("schema", SCHEMA)} what="schema" />
          </>
        )}
        {settings.format === "regex" && area("regex", "Regular expression", "The whole answer matches it.", 2, true)}
        <Field id="set-thinking" label="Thinking" hint="For models that can do both.">
          <select id="set-thinking" value={settings.thinking} onChange={(event) => set("thinking", event.currentTarget.value)}>
            <option value="">as the model does</option>
            <option value="on">think first</option>
            <option value="off">answer at once</option>
          </select>
        </Field>
        <label class="check">
          <input id="set-logprobs" type="checkbox" checked={settings.logprobs} onChange={(event) => set("logprobs", event.currentTarget.checked)} />
          <span>
            Token probabilities <small>Point at a token of the answer to see what else it might have been.</small>
          </span>
        </label>
      </fieldset>
      <fieldset>
        <legend>Tools</legend>
        {area("tools", "Tools that the model may call", "A JSON array as in OpenAI's API. You give the results by hand.", settings.tools ? 10 : 2, true)}
        <Example onClick={() => set("tools", TOOLS)} what="tool" />
      </fieldset>
      <details class="more">
        <summary>Penalties and stop strings</summary>
        <div class="grid-2">{numbers(PENALTIES)}</div>
        {area("stop", "Stop strings", "One a line; the answer ends before them.", 2)}
      </details>
      <button type="button" class="button" onClick={onReset}>
        Back to the server's defaults
      </button>
    </form>
  );
}

function Example({ onClick, what }: { onClick: () => void; what: string }) {
  return (
    <button type="button" class="button small" onClick={onClick}>
      Insert an example {what}
    </button>
  );
}
